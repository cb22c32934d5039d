"""What SGLang's host tier lacks on a CPU: three copy operations of its CUDA kernels, written in torch, and no pinning.

SGLang imports them for accelerators only. Nothing of the storage goes through here; bytes are copied as its kernels do.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys


def copy_same_layout(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """``transfer_kv_direct``: tokens of each layer from one pool to another."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def copy_host_to_layer(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """``transfer_kv_per_layer_direct_pf_lf``: one layer, (page, layer, slot, head, dim) into (token, head, dim)."""
    pages, slots = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id, slots].reshape(len(dst_indices), *target.shape[1:])


def copy_layers_to_host(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """``transfer_kv_all_layer_direct_lf_pf``: all layers, first those of K, then those of V."""
    pages, slots = dst_indices // page_size, dst_indices % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for plane, target in enumerate(dst_ptrs):
        for layer in range(layers):
            source = src_ptrs[plane * layers + layer]
            target[pages, layer, slots] = source[src_indices].reshape(len(src_indices), *target.shape[3:])


OPERATIONS = {
    "transfer_kv_direct": copy_same_layout,
    "transfer_kv_per_layer_direct_pf_lf": copy_host_to_layer,
    "transfer_kv_all_layer_direct_lf_pf": copy_layers_to_host,
}


def add_operations(module):
    """Give a module those operations that it could not import."""
    for name, operation in OPERATIONS.items():
        if not hasattr(module, name):
            setattr(module, name, operation)


def never_register(module):
    """There is no CUDA runtime to register memory with."""
    module._cuda_host_register = lambda *arguments, **named: None


def never_pin(module):
    """There is nothing to pin memory for."""
    module.HostKVCache.pin_memory = property(lambda self: False, lambda self, value: None)


AFTER_IMPORT = {
    "sglang.srt.mem_cache.pool_host.mha": add_operations,
    "sglang.srt.mem_cache.pool_host.mla": add_operations,
    "sglang.srt.mem_cache.pool_host.common": never_register,
    "sglang.srt.mem_cache.pool_host.base": never_pin,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Completes a module right after it was imported."""

    def find_spec(self, name, path=None, target=None):
        complete = AFTER_IMPORT.get(name)
        spec = None if complete is None else importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_complete(module):
            execute(module)
            complete(module)

        spec.loader.exec_module = execute_and_complete
        return spec


sys.meta_path.insert(0, AfterImport())
