"""Any causal model of Transformers behind the native decoder's interface."""
