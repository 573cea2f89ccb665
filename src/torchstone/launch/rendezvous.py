"""How the launchers of several nodes find each other: TorchElastic's c10d rendezvous, plus what it does not provide.

The rendezvous decides which nodes take part, notices nodes that join later, and is public API. On top of it the nodes
exchange their `--node-rank`, because the rendezvous itself orders nodes by address, and the first node opens a store
for the workers of this attempt.

Anyone who reaches the store of the rendezvous can write to it, and torch unpickles the state that it reads there, which
can run any code. So what the launchers write carries a signature (HMAC) with a secret of the run, and nothing else is
read. The stores listen at one address only. The process group of the workers has no such protection: the network of
several nodes must be trusted (docs/clusters.md).

Every call runs in a thread: after the loss of a machine or the network, connections stay open, and a call to torch's
store blocks for 15 minutes. In the meantime the launcher has to watch its workers and react to signals.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from torchstone.errors import UsageError, WorkerError
from torchstone.heartbeat import print_line
from torchstone.launch.nodes import Nodes
from torchstone.launch.supervise import POLL_INTERVAL

T = TypeVar("T")
# Seconds between two checks for nodes that want to join.
MEMBERSHIP_INTERVAL = 2.0
# Seconds to wait for further nodes when enough have joined.
LAST_CALL = 10
# Timeout in seconds for one request to the store.
STORE_TIMEOUT = 60
# Seconds to wait for the other nodes to finish, and for the shutdown call, which may not return.
EXIT_TIMEOUT = 300.0
LEAVE_TIMEOUT = 5.0
LOOPBACK = "127.0.0.1"
# Connections that may wait until the store accepts them: all workers of a large run connect at the same time.
BACKLOG = 4096
# An address reserved for documentation (RFC 5737): the route to it is the default route.
TEST_NET_ADDRESS = "192.0.2.1"
# The secret of a rendezvous: a variable that all nodes have, or else a file in the run's folder, which they share.
SECRET_VARIABLE = "TORCHSTONE_RDZV_SECRET"
SECRET_FILE = ".rendezvous-secret"
SIGNATURE_BYTES = 32


@dataclass(frozen=True)
class RankAssignment:
    """The ranks of this node's workers in one attempt, and the variables by which they find the others."""

    first_rank: int
    world_size: int
    node_rank: int
    num_nodes: int
    attempt: int
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Signature:
    """Signs values with a secret of the run. `key` is where a value is stored: it cannot be moved to another place."""

    secret: bytes

    def sign(self, key: str, value: bytes) -> bytes:
        return self._digest(key, value) + value

    def verify(self, key: str, signed: bytes) -> bytes:
        from torch.distributed.elastic.rendezvous import RendezvousStateError

        digest, value = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(digest, self._digest(key, value)):
            raise RendezvousStateError(f"{key} is not signed with the secret of this run")
        return value

    def _digest(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self.secret, key.encode() + b"\0" + value, "sha256")


class SignedBackend:
    """A `RendezvousBackend` of torch that signs the state of another one, and verifies it before torch unpickles it."""

    def __init__(self, backend: Any, signature: Signature) -> None:
        self._backend, self._signature = backend, signature
        self.name = backend.name

    def get_state(self) -> tuple[bytes, Any] | None:
        answer = self._backend.get_state()
        return None if answer is None else (self._signature.verify("state", answer[0]), answer[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        answer = self._backend.set_state(self._signature.sign("state", state), token)
        return None if answer is None else (self._signature.verify("state", answer[0]), *answer[1:])


class SignedStore:
    """A store of torch with signed JSON values."""

    def __init__(self, store: Any, signature: Signature) -> None:
        self._store, self._signature = store, signature

    def set(self, key: str, value: Any) -> None:
        # In hexadecimal digits: torch declares values as text.
        self._store.set(key, self._signature.sign(key, json.dumps(value).encode()).hex())

    def get(self, key: str) -> Any:
        try:
            signed = bytes.fromhex(self._store.get(key).decode())
        except ValueError:
            signed = b""
        return json.loads(self._signature.verify(key, signed))


class NodeGroup:
    """The nodes of a run, as the launcher of one node sees them. A `WorkerError` means that they are out of reach."""

    def __init__(
        self,
        nodes: Nodes,
        nproc: int,
        join_timeout: float,
        is_stopped: Callable[[], bool],
        secret_file: Path | None = None,
    ) -> None:
        assert nodes.rdzv_endpoint is not None
        self._signature = Signature(read_secret(secret_file))
        self._nodes, self._endpoint, self._nproc = nodes, nodes.rdzv_endpoint, nproc
        self._join_timeout, self._is_stopped = join_timeout, is_stopped
        self._handler: Any = None
        # Torch's result of the last rendezvous, and the store of the workers, if this node hosts it.
        self._info: Any = None
        self._worker_store: Any = None
        self._waiting_nodes: Future[Any] | None = None
        self._next_question = 0.0

    def join(self, attempt: int) -> RankAssignment | None:
        """Waits for the other nodes, for `join_timeout` at most. None if a signal arrived."""
        if self._handler is None:
            low, high = self._nodes.min_nodes, self._nodes.max_nodes
            print_line(f"waiting for {low if low == high else f'{low} to {high}'} nodes at {self._endpoint}")
            _import_torch()
        self._waiting_nodes = None
        future = _run_in_thread(lambda: self._join(attempt))
        while not _is_done(future) and not self._is_stopped():
            pass
        return None if self._is_stopped() else self._result_of(future)

    def has_new_nodes(self) -> bool:
        """Whether nodes wait to join; False while there is no answer. Asks every few seconds."""
        if self._waiting_nodes is None:
            if time.monotonic() < self._next_question:
                return False
            self._waiting_nodes = _run_in_thread(self._handler.num_nodes_waiting)
        if not self._waiting_nodes.done():
            return False
        count, self._waiting_nodes = self._result_of(self._waiting_nodes), None
        self._next_question = time.monotonic() + MEMBERSHIP_INTERVAL
        if count:
            print_line(f"{count} more node{'s' if count > 1 else ''} joined: all workers save and restart together")
        return bool(count)

    def is_growing(self) -> bool:
        """Whether workers that saved without a signal did so because a node wants to join. Takes a few seconds."""
        handler = self._handler
        # A closed rendezvous, or one that is out of reach: another node has stopped.
        answer = self._poll_until_true(
            lambda: handler.num_nodes_waiting() or -handler.is_closed(), 2 * MEMBERSHIP_INTERVAL
        )
        return answer is not None and answer > 0

    def wait_for_all(self) -> None:
        """Waits until the workers of all nodes have finished: this node may host the store that they use."""
        info = self._info
        keys = [f"torchstone/finished/{number}" for number in range(info.world_size)]

        def is_finished() -> bool:
            info.store.set(keys[info.rank], "")
            return info.store.check(keys) or self._handler.is_closed()

        self._poll_until_true(is_finished, EXIT_TIMEOUT)

    def leave(self) -> None:
        """Closes the rendezvous, which ends the run for the other nodes as well."""
        if self._handler is not None:
            _is_done(_run_in_thread(self._handler.shutdown), LEAVE_TIMEOUT)

    def _poll_until_true(self, question: Callable[[], T], seconds: float) -> T | None:
        """Calls `question` until it returns a true value. None after `seconds`, a signal or an error."""
        deadline = time.monotonic() + seconds
        future = _run_in_thread(question)
        while time.monotonic() < deadline and not self._is_stopped():
            if _is_done(future):
                if future.exception() or future.result():
                    return None if future.exception() else future.result()
                time.sleep(POLL_INTERVAL)
                future = _run_in_thread(question)
        return None

    def _result_of(self, future: Future[T]) -> T:
        from torch.distributed import DistError
        from torch.distributed.elastic import rendezvous

        try:
            return future.result()
        except rendezvous.RendezvousTimeoutError as error:
            text = f"fewer than {self._nodes.min_nodes} nodes joined at {self._endpoint} in {self._join_timeout:g} s"
            raise WorkerError(text, "start all nodes; --system.join_timeout sets the limit") from error
        except rendezvous.RendezvousClosedError as error:
            raise WorkerError("another node has ended the run") from error
        except rendezvous.RendezvousStateError as error:
            text = f"the node at {self._endpoint} belongs to another run, or someone else wrote to it: {error}"
            raise WorkerError(text, f"use the same output_dir, or the same {SECRET_VARIABLE}, on all nodes") from error
        except (rendezvous.RendezvousError, DistError, OSError) as error:
            raise WorkerError(f"cannot reach the node at {self._endpoint}: {error.__cause__ or error}") from error

    def _join(self, attempt: int) -> RankAssignment:
        if self._handler is None:
            self._handler = self._connect()
        # Torch would publish the address of its own worker store only once: a node that joins later would not get it.
        with _variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"):
            self._info = self._handler.next_rendezvous()
        rank, num_nodes = self._info.rank, self._info.world_size
        store = SignedStore(self._info.store, self._signature)
        store.set(f"torchstone/node/{rank}", [self._nodes.node_rank, self._nproc, attempt])
        nodes = [store.get(f"torchstone/node/{number}") for number in range(num_nodes)]
        order = _order([node_rank for node_rank, _, _ in nodes])
        position = order.index(rank)
        sizes = [nodes[number][1] for number in order]
        # Nodes may have started their workers a different number of times.
        attempt = max(number for _, _, number in nodes)
        address = own_address(self._endpoint)
        if position == 0:
            # A new store for every attempt: an old one holds the addresses of processes that are gone.
            self._worker_store = host_store(address, 0)
            print_line(f"the store of the workers listens at {address}, port {self._worker_store.port}")
            store.set("torchstone/store", [address, self._worker_store.port])
        host, port = store.get("torchstone/store")
        # The last one tells torch that the store runs in the launcher and not in rank 0.
        environment = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environment |= interface_variables(address, "GLOO_SOCKET_IFNAME")
        return RankAssignment(sum(sizes[:position]), sum(sizes), position, num_nodes, attempt, environment)

    def _connect(self) -> Any:
        """Torch's handler. Retries, because the host may start later and its name may not resolve yet."""
        from torch.distributed import DistError
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        nodes, deadline = self._nodes, time.monotonic() + self._join_timeout
        timeouts = {"join_timeout": int(self._join_timeout), "last_call_timeout": LAST_CALL}
        while True:
            try:
                store = self._open_store()
                backend: Any = SignedBackend(C10dRendezvousBackend(store, nodes.rdzv_id), self._signature)
                limits, local_addr = (nodes.min_nodes, nodes.max_nodes), own_address(self._endpoint)
                parameters = RendezvousParameters(
                    "c10d", self._endpoint, nodes.rdzv_id, *limits, local_addr, **timeouts
                )
                return create_handler(store, backend, parameters)
            except (RendezvousConnectionError, DistError, OSError) as error:
                # Without --node-rank this node may be the host, which must know its own name.
                is_host_unknown = nodes.node_rank is None and isinstance(error, socket.gaierror)
                if time.monotonic() > deadline or nodes.node_rank == 0 or is_host_unknown or self._is_stopped():
                    raise
            time.sleep(1)

    def _open_store(self) -> Any:
        """The store of the rendezvous. Node 0 hosts it; without --node-rank, the first launcher at the endpoint."""
        from torch.distributed import TCPStore

        host, _, port = self._endpoint.rpartition(":")
        host = host.strip("[]")
        timeout = timedelta(seconds=max(1, int(min(STORE_TIMEOUT, self._join_timeout))))
        if self._nodes.node_rank == 0 or (self._nodes.node_rank is None and _is_own_address(_resolve(host))):
            address = _listen_address(host)
            try:
                store = host_store(address, int(port), timeout)
                print_line(f"the rendezvous listens at {address or 'all addresses of this machine'}, port {port}")
                return store
            except OSError as error:
                if self._nodes.node_rank == 0 or error.errno != errno.EADDRINUSE:
                    raise
        # Torch waits for a minute at a time, deep in C++, where it cannot be interrupted.
        socket.create_connection((host, int(port)), timeout=5).close()
        return TCPStore(host, int(port), is_master=False, timeout=timeout, wait_for_workers=False)


def read_secret(file: Path | None) -> bytes:
    """The secret of the run, from the environment or from `file`, which the first node creates."""
    if secret := os.environ.get(SECRET_VARIABLE):
        return secret.encode()
    if file is None:
        print_line(f"warning: anyone who reaches the rendezvous can join it; set {SECRET_VARIABLE} on all nodes")
        return b""
    try:
        if not file.exists():
            _create_secret(file)
        secret = file.read_text().strip()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot create or read the secret of the rendezvous: {error}", f"set {SECRET_VARIABLE} on all nodes"
        ) from None
    if not secret:
        raise UsageError(f"{file}, the secret of the rendezvous, is empty", "remove it, and start all nodes again")
    return secret.encode()


def _create_secret(file: Path) -> None:
    """Writes a secret that only this user can read. The file is complete or absent; that of a faster node stays."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", prefix=f"{file.name}.", dir=file.parent) as new:
        new.write(secrets.token_hex(32))
        new.flush()
        os.fsync(new.fileno())
        with suppress(FileExistsError):
            os.link(new.name, file)


def host_store(address: str, port: int, timeout: timedelta = timedelta(seconds=STORE_TIMEOUT)) -> Any:
    """A store that listens at this address only, at a free port for port 0; without an address, at all of them.

    Torch's own sockets always listen at all addresses.
    """
    from torch.distributed import TCPStore

    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
    else:
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        listener = socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
    return TCPStore(
        address or LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        # The store closes the socket.
        master_listen_fd=listener.detach(),
    )


def _listen_address(host: str) -> str:
    """The address of this machine that `host` means; empty if that cannot be known.

    Machines often know their own name as 127.0.1.1, which other nodes cannot reach, and the name of a Kubernetes
    service may have an address that no machine has.
    """
    address = _resolve(host)
    is_unknown = ip_address(address.partition("%")[0]).is_loopback and not _is_loopback_name(host)
    return address if _is_own_address(address) and not is_unknown else ""


def _is_own_address(address: str) -> bool:
    import psutil

    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return address in own or ip_address(address.partition("%")[0]).is_loopback


def _is_loopback_name(host: str) -> bool:
    return host.startswith(("127.", "::1", "localhost"))


def _resolve(host: str) -> str:
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def interface_variables(address: str, *names: str) -> dict[str, str]:
    """The variables `names` that the user has not set, with the name of the interface that has this address.

    Without GLOO_SOCKET_IFNAME gloo looks up the machine's own name, which may resolve to any interface.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return {variable: name for variable in names if variable not in os.environ}
    return {}


def own_address(endpoint: str) -> str:
    """The address by which the other nodes see this machine. Its name may be unknown to them.

    The node at the endpoint often sees itself as 127.0.1.1; then the address of the default route is used.
    """
    host = endpoint.rpartition(":")[0].strip("[]")
    address = _address_towards(host)
    if not _is_loopback_name(address) or _is_loopback_name(host):
        return address
    try:
        return _address_towards(TEST_NET_ADDRESS)
    except OSError:
        return host


def _address_towards(host: str) -> str:
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends nothing: connecting a datagram socket only looks up the route.
        probe.connect(target)
        return str(probe.getsockname()[0])


def _order(node_ranks: list[int | None]) -> list[int]:
    """The rendezvous ranks of the nodes, in the order of their `--node-rank`; then those without one."""
    known = [rank for rank in node_ranks if rank is not None]
    if len(set(known)) < len(known):
        raise WorkerError(f"two nodes have the same --node-rank: {sorted(known)}", "give each node its own")
    return sorted(range(len(node_ranks)), key=lambda number: (node_ranks[number] is None, node_ranks[number] or 0))


def _run_in_thread(function: Callable[[], T]) -> Future[T]:
    """Runs it in a daemon thread, which does not keep the process alive if it never returns."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _is_done(future: Future[Any], seconds: float = POLL_INTERVAL) -> bool:
    return bool(wait([future], seconds).done)


def _import_torch() -> None:
    """Call it in the main thread: a process cannot exit cleanly while another thread imports torch."""
    # Torch reads it once, on import. Otherwise it warns, with a C++ stack, when another node ends first.
    with _variable("TORCH_CPP_LOG_LEVEL", os.environ.get("TORCH_CPP_LOG_LEVEL") or "ERROR"):
        import torch.distributed.elastic.rendezvous  # noqa: F401
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable temporarily; workers must not inherit it."""
    previous, os.environ[name] = os.environ.get(name), value
    try:
        yield
    finally:
        del os.environ[name]
        os.environ |= {} if previous is None else {name: previous}
