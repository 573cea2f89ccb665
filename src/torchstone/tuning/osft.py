"""OSFT, orthogonal-subspace fine-tuning: the largest singular directions of a matrix are frozen, the rest is trained.

    W = U S V^T         the k largest singular values belong to U_high and V_high, the other r to U_low and V_low
    W = W0 + Z P        if W is tall (out >= in):  P = V_low^T [r, in],  Z [out, r],  U_high^T Z = 0
    W = W0 + (Z P)^T    if W is wide (out < in):   P = U_low^T [r, out], Z [in, r],   V_high^T Z = 0

W0 and P are frozen. Z is trained and starts at zero, so training starts from the model as it is, to the last bit.
U_high^T W V_high, U_high^T W and W V_high never change: in these directions the model computes what it computed before.
Training U_low, S_low and V_low, projected off U_high and V_high, reaches the same matrices and no others: P spans
all that is orthogonal to the frozen directions on the smaller side, so only the other side needs a projection.

The forward pass multiplies by the dense W (`merge`), at the cost of full fine-tuning. The gradient of Z is dY^T
(X P^T), which takes about r / m of the time of a full weight gradient. `SubspaceProjection` projects gradients before
they are clipped, and then what the optimizer adds to Z: Adam divides every element by a scale of its own, which leaves
the subspace. Weight decay acts on W_low, which is W0_low + Z P, as in full fine-tuning, and not on Z alone.

Below, n is the larger dimension of W, m the smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchstone.models.tensors import NamedTensors, TensorSource, slice_at
from torchstone.optim.adamw import AdamW
from torchstone.optim.clip import to_local
from torchstone.tuning.lora import parameter_name, rounding_error, split_parameter_name, wider_dtype

# The names of the factors, and of the adapter that they belong to.
OSFT_Z, OSFT_P, OSFT_ADAPTER = "osft_Z", "osft_P", "osft"
# The largest error of a cached decomposition, relative to the weight.
DECOMPOSITION_ERROR = 1e-5
# Unit vectors are nearly orthogonal if their product is smaller than this.
NEARLY_ORTHOGONAL = 1e-2


def frozen_rank(shape: Sequence[int], unfreeze_rank_ratio: float) -> int:
    """k, the number of frozen directions of a matrix."""
    # In decimal numbers: in floating point, 1 - 0.9 is less than 0.1.
    return math.floor(min(shape) * (1 - Fraction(str(unfreeze_rank_ratio))))


class OsftFactors(nn.Module):
    """Z and P of one linear. `rank` is r."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.is_wide = linear.out_features < linear.in_features
        n, m = sorted((linear.out_features, linear.in_features), reverse=True)
        self.osft_Z = nn.Parameter(linear.weight.new_empty(n, rank))
        self.osft_P = nn.Parameter(linear.weight.new_empty(rank, m), requires_grad=False)

    @property
    def sharded_dims(self) -> dict[str, tuple[int, int]]:
        """The dimension in which a factor is sharded like the weight: that of the factor, and that of the weight."""
        return {OSFT_Z: (0, int(self.is_wide)), OSFT_P: (1, int(not self.is_wide))}


class OsftLinear(nn.Linear):
    """A linear after `add_osft`. Its own parameters keep their names."""

    adapters: nn.ModuleDict

    def forward(self, x: Tensor) -> Tensor:
        factors = self.adapters[OSFT_ADAPTER]
        z, p, is_wide = factors.osft_Z, factors.osft_P, factors.is_wide
        if isinstance(self.weight, DTensor):
            return F.linear(x, merge(self.weight, z, p, is_wide), self.bias)
        return osft_linear(x, self.weight, self.bias, z, p, is_wide)


def merge(weight: Tensor, z: Tensor, p: Tensor, is_wide: bool) -> Tensor:
    """The dense W."""
    return torch.addmm(weight, p.t(), z.t()) if is_wide else torch.addmm(weight, z, p)


# An operator, so that activation checkpointing sees one operation whose input is all that it needs. A compiled
# autograd.Function keeps its output.
@torch.library.custom_op("torchstone::osft_linear", mutates_args=())
def osft_linear(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, p: Tensor, is_wide: bool) -> Tensor:
    """x @ merge(weight, z, p).T + bias. The reference is autograd through that, which computes the full weight
    gradient. The bias is added before the output is rounded, as in the model."""
    return F.linear(x, merge(weight, z, p, is_wide), bias)


@osft_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, p: Tensor, is_wide: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, z, p, ctx.is_wide = inputs
    ctx.save_for_backward(x, weight, z, p)


def _backward_linear(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, z, p = ctx.saved_tensors
    dx = dy @ merge(weight, z, p, ctx.is_wide) if ctx.needs_input_grad[0] else None
    d_bias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
    dz = None
    if ctx.needs_input_grad[3]:
        long, short = (x, dy) if ctx.is_wide else (dy, x)
        dz = long.flatten(0, -2).t() @ (short.flatten(0, -2) @ p.t())
    return dx, None, d_bias, dz, None, None


osft_linear.register_autograd(_backward_linear, setup_context=_save_linear)


def add_osft(module: nn.Module, ranks: Mapping[str, int]) -> None:
    """Adds uninitialized factors to the linears of `module` that `ranks` names, in place."""
    for name, linear in list(module.named_modules()):
        if name in ranks:
            assert type(linear) is nn.Linear, name
            # A class, not a method of each instance: torch.compile reuses a graph for blocks of the same classes.
            linear.__class__ = OsftLinear
            linear.adapters = nn.ModuleDict({OSFT_ADAPTER: OsftFactors(linear, ranks[name])})


@torch.no_grad()
def singular_vectors(weight: Tensor) -> Tensor:
    """The singular vectors [m, m] of the smaller dimension, in fp32, in descending order of their singular values.

    They are the eigenvectors of the smaller Gram matrix, in fp64, which takes a fraction of the time of an SVD. The
    largest component of each is positive: a decomposition alone does not decide the signs.
    """
    tall = _tall(weight.double())
    vectors = torch.linalg.eigh(tall.t() @ tall).eigenvectors.flip(1)
    return (vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()).float()


@torch.no_grad()
def is_decomposition(weight: Tensor, vectors: Tensor) -> bool:
    """Whether `vectors` are the singular vectors of this weight and not, say, of an earlier version of it."""
    if vectors.shape != (min(weight.shape),) * 2 or not vectors.isfinite().all():
        return False
    vectors, limit = vectors.double(), DECOMPOSITION_ERROR
    left = _tall(weight.double()) @ vectors
    gram, identity = left.t() @ left, torch.eye(len(vectors), dtype=vectors.dtype, device=vectors.device)
    squares, norm = gram.diagonal(), torch.linalg.norm(gram)
    return bool(
        (vectors.t() @ vectors - identity).abs().max() < limit
        and torch.linalg.norm(gram - squares.diag()) <= limit * norm
        and (squares.diff() <= limit * norm).all()
    )


@torch.no_grad()
def with_low_vectors(vectors: Tensor, p: Tensor) -> Tensor:
    """Singular vectors whose last ones are the rows of `p`, and whose first ones are orthogonal to these.

    A run that resumes has the P of its checkpoint. Vectors that were computed again may have other signs. Among equal
    singular values they may be any basis; if such values are on both sides of k, the first vectors are not orthogonal
    to P.
    """
    p = p.double()
    high = vectors[:, : vectors.shape[1] - len(p)].double()
    if high.shape[1] and (p @ high).abs().max() > DECOMPOSITION_ERROR:
        high = torch.linalg.qr(p.t(), mode="complete").Q[:, len(p) :]
    return torch.cat([high, p.t()], dim=1)


@torch.no_grad()
def frozen_basis(weight: Tensor, vectors: Tensor, frozen: int) -> Tensor:
    """An orthonormal basis [n, k] of the frozen directions of the larger dimension, in fp32."""
    left = _tall(weight.double()) @ vectors[:, :frozen].double()
    unit = left / torch.linalg.vector_norm(left, dim=0)
    gram = unit.t() @ unit
    # Rounding of `vectors` makes them only nearly orthogonal. A Cholesky decomposition corrects that in a fifth of the
    # time of a QR decomposition, but singular values of zero make them NaN.
    if frozen and (gram - torch.eye(frozen, dtype=gram.dtype, device=gram.device)).abs().max() < NEARLY_ORTHOGONAL:
        upper = torch.linalg.cholesky(gram, upper=True)
        return torch.linalg.solve_triangular(upper, unit, upper=True, left=False).float()
    return torch.linalg.qr(left).Q.float()


def _tall(weight: Tensor) -> Tensor:
    return weight.t() if weight.shape[0] < weight.shape[1] else weight


class VectorSource(Protocol):
    """Has the singular vectors of linears."""

    def read(self, linear: str) -> Tensor: ...


class InitialOsft:
    """A `TensorSource` of first values: zeros for Z, the singular vectors of the smallest singular values for P."""

    def __init__(self, vectors: VectorSource, ranks: Mapping[str, int]) -> None:
        self.vectors, self.ranks = vectors, ranks

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        linear, _, kind = split_parameter_name(name)
        if kind == OSFT_Z:
            target.zero_()
            return
        p = self.vectors.read(linear)[:, -self.ranks[linear] :].t()
        target.copy_(p[slice_at(offset, target.shape)])


def split_bf16(x: Tensor) -> Tensor:
    """Two bf16 tensors, stacked [2, ...], whose sum has the first 16 bits of x."""
    parts = x.new_empty(2, *x.shape, dtype=torch.bfloat16)
    parts[0] = x
    torch.sub(x, parts[0], out=parts[1])
    return parts


def add_split_product(tensor: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
    """tensor += alpha * a @ b in fp32. `a` and `b` are results of `split_bf16`.

    On a GPU, which has tensor cores for bf16 but not for fp32, this takes a quarter of the time of fp32.
    """
    for left, right in ((a[0], b[1]), (a[1], b[0]), (a[0], b[0])):
        if tensor.is_cuda:
            torch.addmm(tensor, left, right, alpha=alpha, out_dtype=torch.float32, out=tensor)
        else:
            tensor.addmm_(left.float(), right.float(), alpha=alpha)


class FrozenBasis(NamedTuple):
    """A Z, the frozen directions [n, k] that it must be orthogonal to, and, if weights decay, W0_low P^T [n, r].

    Both tensors have the rows that this rank holds of Z. They are in fp32; or the directions are a result of
    `split_bf16`, and the other one is in bf16.
    """

    parameter: nn.Parameter
    basis: Tensor
    initial: Tensor | None


class SubspaceProjection:
    """Keeps every Z orthogonal to the frozen directions. All ranks must call its methods together.

    With a basis in split bf16, 1e-5 of what is projected out remains, instead of 1e-7.
    """

    def __init__(self, bases: Sequence[FrozenBasis]) -> None:
        self.bases = list(bases)

    @property
    def nbytes(self) -> int:
        tensors = [tensor for each in self.bases for tensor in (each.basis, each.initial) if tensor is not None]
        return sum(tensor.nbytes for tensor in tensors)

    @torch.no_grad()
    def project_gradients(self) -> None:
        """Projects the gradients of every Z in fp32, also if they are in bf16."""
        for parameter, basis, _ in self.bases:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.dtype != torch.float32:
                parameter.grad = gradient = gradient.float()
            self._project(parameter, to_local(gradient), basis)

    @torch.no_grad()
    def project_parameters(self) -> None:
        """Projects every Z, for values that are not those of training."""
        for parameter, basis, _ in self.bases:
            self._project(parameter, to_local(parameter), basis)

    @contextmanager
    def projected_update(self, optimizer: AdamW, coefficient: Tensor) -> Iterator[None]:
        """Projects the change that the optimizer makes to each Z within the context. W0_low decays like Z.

        `coefficient`: the clipping coefficient. If it is NaN, the optimizer changes nothing, and W0_low does not decay.
        """
        before = [to_local(parameter).detach().clone() for parameter, _, _ in self.bases]
        yield
        decay = {p: group["lr"] * group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        with torch.no_grad():
            for (parameter, basis, initial), old in zip(self.bases, before, strict=True):
                value = to_local(parameter)
                value -= old
                if initial is not None:
                    value -= initial.to(value) * (decay[parameter] * coefficient.isfinite()).to(value)
                self._project(parameter, value, basis)
                value += old
                if parameter in optimizer.copies:
                    optimizer.copies[parameter].copy_(value)

    @torch.no_grad()
    def measure(self, index: int) -> Tensor:
        """The norm of the part of one Z that lies in the frozen directions, relative to the norm of Z. In fp64."""
        if not self.bases:
            return torch.zeros((), dtype=torch.float64)
        parameter, basis, _ = self.bases[index % len(self.bases)]
        value, basis = to_local(parameter).double(), basis.double()
        if basis.dim() == 3:
            basis = basis.sum(0)
        inside = self._sum_shards(parameter, basis.t() @ value).square().sum()
        total = self._sum_shards(parameter, value.square().sum())
        return (inside / total.clamp(min=1e-300)).sqrt()

    def _project(self, parameter: nn.Parameter, tensor: Tensor, basis: Tensor) -> None:
        """Subtracts the part of `tensor` that lies in the frozen directions. It is sharded like the parameter."""
        if basis.dtype == torch.float32:
            tensor.addmm_(basis, self._sum_shards(parameter, basis.t() @ tensor), alpha=-1)
            return
        inside = tensor.new_zeros(basis.shape[2], tensor.shape[1])
        add_split_product(inside, basis.mT, split_bf16(tensor))
        add_split_product(tensor, basis, split_bf16(self._sum_shards(parameter, inside)), alpha=-1)

    def _sum_shards(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """The sum over the ranks that have different rows of the parameter."""
        if isinstance(parameter, DTensor):
            for dim, placement in enumerate(parameter.placements):
                if not isinstance(placement, Replicate):
                    dist.all_reduce(tensor, group=parameter.device_mesh.get_group(dim))
        return tensor


class MergedOsft:
    """A `TensorSource` of dense weights: those of `base` with the updates Z P that `values` has.

    A weight is merged in a wider dtype and rounded once. `errors` has what rounding lost, by name (`rounding_error`).
    If `values` has another parameter, it replaces that of `base`.
    """

    def __init__(
        self,
        base: TensorSource,
        values: NamedTensors,
        ranks: Mapping[str, int],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """`shapes`: of the base's parameters."""
        self.base, self.values, self.ranks, self.shapes = base, values, ranks, shapes
        self._replaced = frozenset(values.names)
        self.errors: dict[str, float] = {}

    def read_into(self, name: str, target: Tensor, offset: Sequence[int]) -> None:
        linear = name.removesuffix(".weight")
        if linear not in self.ranks:
            (self.values if name in self._replaced else self.base).read_into(name, target, offset)
            return
        dtype = wider_dtype(target.dtype)
        base = torch.empty(target.shape, dtype=dtype)
        self.base.read_into(name, base, offset)
        rows, columns = self.shapes[name]
        is_wide = rows < columns
        # The dimensions of the target that Z and P have.
        long, short = (1, 0) if is_wide else (0, 1)
        z = torch.empty(target.shape[long], self.ranks[linear], dtype=dtype)
        p = torch.empty(self.ranks[linear], target.shape[short], dtype=dtype)
        self.values.read_into(parameter_name(linear, OSFT_ADAPTER, OSFT_Z), z, (offset[long], 0))
        self.values.read_into(parameter_name(linear, OSFT_ADAPTER, OSFT_P), p, (0, offset[short]))
        merged = merge(base, z, p, is_wide)
        target.copy_(merged)
        self.errors[name] = max(self.errors.get(name, 0.0), rounding_error(base, merged, target.cpu()))
