"""How fast a simulated engine is, and how much it keeps: stated parameters, nothing measured.

Times follow from a roofline with two assumed efficiencies::

    prefill of n tokens behind c cached ones = overhead + (2 P n + 4 L d (n c + n²/2)) / (FLOP/s × compute efficiency)
    one decode step = step overhead + (weights + KV of all contexts) / (bytes/s × memory efficiency) + Σ sequence

Sources of the presets (the efficiencies 0.45 to 0.50 and 0.70 are assumptions in the range that engines publish):

* H100 SXM: 989 TFLOP/s dense BF16 and 3.35 TB/s (NVIDIA's data sheet), 80 GB each.
* Llama 3.1 8B: 8.03e9 parameters, 32 layers, width 4096, 8 KV heads of 128: 131,072 bytes of BF16 KV a token.
* Llama 3.1 70B: 70.6e9 parameters, 80 layers, width 8192: 327,680 bytes a token (both: "The Llama 3 Herd
  of Models", table 3).
* Device memory: what is left of HBM beside the weights, rounded: 0.4 M tokens for 8B, 1.3 M for 70B over 8 GPUs.
* Links: host memory over PCIe 5 x16 (50 of 63 GB/s for one GPU; 200 GB/s for eight that share a host), NVMe 6 GB/s a
  drive (24 for four), pool over the network 2.5 GB/s (10 for eight GPUs).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gateway.routing import Rates


@dataclass(frozen=True)
class EnginePerformance:
    """One instance: a model on its GPUs. Sizes of lower tiers are tokens; 0 is no such tier."""

    name: str
    parameters: float
    layers: int
    width: int
    kv_bytes_per_token: int
    flop_per_s: float
    memory_bytes_per_s: float
    device_tokens: int
    compute_efficiency: float = 0.45
    memory_efficiency: float = 0.70
    weight_bytes_per_parameter: float = 2.0
    request_overhead_s: float = 0.010
    step_overhead_s: float = 0.003
    sequence_overhead_s: float = 20e-6
    chunk_tokens: int = 2048
    running_limit: int = 256
    host_tokens: int = 0
    disk_tokens: int = 0
    host_bytes_per_s: float = 50e9
    disk_bytes_per_s: float = 6e9
    pool_bytes_per_s: float = 2.5e9

    @cached_property
    def token_s(self) -> float:
        """Computing one prompt token at the start of a prompt."""
        return 2 * self.parameters / (self.flop_per_s * self.compute_efficiency)

    @cached_property
    def attention_s(self) -> float:
        """What one more token of context adds to computing one token."""
        return 4 * self.layers * self.width / (self.flop_per_s * self.compute_efficiency)

    @cached_property
    def context_read_s(self) -> float:
        """Reading one token's KV in a decode step."""
        return self.kv_bytes_per_token / (self.memory_bytes_per_s * self.memory_efficiency)

    @cached_property
    def weights_read_s(self) -> float:
        """Reading the weights in a decode step."""
        return self.weight_bytes_per_parameter * self.parameters / (self.memory_bytes_per_s * self.memory_efficiency)

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Return the time to compute ``new_tokens`` behind ``cached_tokens`` with nothing else running."""
        context = new_tokens * cached_tokens + new_tokens * new_tokens / 2
        return self.request_overhead_s + new_tokens * self.token_s + context * self.attention_s

    def decode_reads_s(self, sequences: int, context_tokens: float) -> float:
        """Return what running sequences add to a step, their contexts summed."""
        return sequences * self.sequence_overhead_s + context_tokens * self.context_read_s

    def decode_step_s(self, sequences: int, context_tokens: float) -> float:
        """Return one decode step without prefill."""
        return self.step_overhead_s + self.weights_read_s + self.decode_reads_s(sequences, context_tokens)

    def fetch_s(self, tier_tokens: tuple[int, int, int, int]) -> float:
        """Return the time to read these tokens (by tier; the device's are free)."""
        _, host, disk, pool = tier_tokens
        return self.kv_bytes_per_token * (
            host / self.host_bytes_per_s + disk / self.disk_bytes_per_s + pool / self.pool_bytes_per_s
        )

    def rates(self) -> Rates:
        """Return where a router starts from: prefill at no context, and the links."""
        per_token = self.kv_bytes_per_token
        return Rates(
            prefill=1 / self.token_s,
            host=self.host_bytes_per_s / per_token,
            disk=self.disk_bytes_per_s / per_token,
            pool=self.pool_bytes_per_s / per_token,
        )


PRESETS = {
    preset.name: preset
    for preset in (
        EnginePerformance(
            name="llama8b-h100",
            parameters=8.03e9,
            layers=32,
            width=4096,
            kv_bytes_per_token=131_072,
            flop_per_s=989e12,
            memory_bytes_per_s=3.35e12,
            device_tokens=400_000,
            compute_efficiency=0.50,
            step_overhead_s=0.002,
        ),
        EnginePerformance(
            name="llama70b-tp8-h100",
            parameters=70.6e9,
            layers=80,
            width=8192,
            kv_bytes_per_token=327_680,
            flop_per_s=8 * 989e12,
            memory_bytes_per_s=8 * 3.35e12,
            device_tokens=1_300_000,
            step_overhead_s=0.006,
            host_bytes_per_s=200e9,
            disk_bytes_per_s=24e9,
            pool_bytes_per_s=10e9,
        ),
    )
}
