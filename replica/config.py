"""The replica's settings: every field with its unit, unknown keys refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from shared.settings import Settings
from shared.tracing import TracingConfig


class ReplicaConfig(Settings):
    base: Path = Field(examples=["./base"])
    """Folder of the base model as Hugging Face has it: config.json, safetensors, tokenizer.json."""
    adapters: Path = Field(examples=["./adapters"])
    """Root of the adapter store: one PEFT folder an adapter. Nothing outside it is ever read."""
    name: str = Field("replica-0", min_length=1, max_length=128)
    """Stable name of this replica: gateways hash it, so that a restart moves no adapter."""
    served_name: str = ""
    """Name of the base in a request's `model`; empty takes the base folder's name."""
    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 inside a container."""
    port: int = Field(0, ge=0, le=65535)
    """TCP port; 0 takes a free one, which the ready line names."""

    max_loras: int = Field(4, ge=1)
    """Slots: adapters that can be in one forward pass."""
    max_lora_rank: int = Field(64, ge=1)
    """An adapter of a higher rank is refused."""
    max_cpu_loras: int | None = Field(None, ge=1)
    """Adapters kept in host memory, a copy away from a slot; null: as many as `host_bytes` hold."""
    host_bytes: int | None = Field(4 << 30, ge=1)
    """Bytes of host memory for adapters; null: no limit but `max_cpu_loras`."""

    adapter_store: str = ""
    """URL of an object store with one PEFT folder an adapter (s3://bucket/prefix, gs://, az://,
    file:///); `adapters` is then its cache on the local disk. Empty: `adapters` is the store."""
    adapter_store_options: dict[str, str] = Field(default_factory=dict)
    """Options of the store's client (endpoint, region, …). Credentials are better left to the
    environment (AWS_ACCESS_KEY_ID, …)."""
    disk_cache_bytes: int = Field(20 << 30, ge=1)
    """Bytes of local disk for adapters of the object store."""

    merged: str = ""
    """An adapter of the store to fold into the base: this replica then serves it, and only it."""

    device: str = "cpu"
    """Torch device the base runs on."""
    dtype: str = Field("float32", pattern="^(float32|bfloat16|float16)$")
    """Type of the base's weights and activations."""
    quantization: str = Field("none", pattern="^(none|fp8)$")
    """How the base's linear weights are kept: none is as `dtype`, fp8 a quarter of float32."""
    threads: int = Field(0, ge=0)
    """Threads of one forward pass on a CPU; 0 takes as many as there are cores."""
    spin: bool = False
    """These threads spin between two parts of a pass: a quarter faster where this replica has its
    cores to itself, several times slower where it has not."""

    max_running: int = Field(32, ge=1)
    """Sequences that run at once; beyond it they wait."""
    max_waiting: int = Field(256, ge=0)
    """Sequences that may wait; the next is refused with 503."""
    max_step_tokens: int = Field(512, ge=1)
    """Tokens of one forward pass; a longer prompt is computed in chunks."""
    mixed_step_ratio: float = Field(3, gt=1)
    """How many times as long as a pass that only decodes one may take that computes prompts beside
    it: chunks are cut so. Less is smoother for who reads a reply, more is sooner for who waits for
    its first token."""
    max_model_len: int | None = Field(None, ge=2)
    """Tokens of prompt and output together. Pages for one such sequence are never given to
    adapters; null takes the base's own limit, or what half the pages hold where that is less. A
    base with a sliding window in every layer holds a window of it at a time."""
    page_tokens: int = Field(16, ge=1)
    """Tokens whose keys and values fill one page of the pool."""
    pages: int = Field(512, ge=2)
    """Pages of the pool, which sequences and adapters share."""

    choices_max: int = Field(32, ge=1)
    """Sequences one request may open (prompts times `n`)."""
    body_max_bytes: int = Field(10 << 20, ge=1024)
    """A larger request body is refused with 413."""
    fleet_token: str = ""
    """When set, calls that load, unload, pin, prefetch or drain must carry it."""
    join: str = Field("", pattern=r"^(https?://\S+)?$")
    """http://HOST:PORT of a gateway's admin port: this replica announces itself there, with the
    fleet token, and every gateway of the fleet hears of it. Empty: a list or DNS names it."""
    join_url: str = Field("", pattern=r"^(https?://\S+)?$")
    """Address at which gateways reach it; empty: the one it listens on."""

    rescan_s: float = Field(2, gt=0)
    """The adapter folder is looked through this often."""
    report_interval_s: float = Field(0.05, gt=0)
    """Least time between two residency reports."""
    heartbeat_s: float = Field(1, gt=0)
    """Longest silence between two residency reports."""
    keepalive_s: float = Field(10, gt=0)
    """A stream that has nothing to send gets an SSE comment this often."""
    stall_s: float = Field(120, gt=0)
    """A forward pass that takes longer makes /health fail."""
    drain_s: float = Field(30, ge=0)
    """After SIGTERM running sequences get this long."""
    tracing: TracingConfig = TracingConfig()
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""
    log_requests: Literal["none", "failed", "all"] = "failed"
    """Which requests leave a line in the log: adapter, tokens, times; never a prompt."""

    @property
    def step_threads(self) -> int:
        """Threads of one forward pass, whether set or found."""
        return self.threads or os.cpu_count() or 1

    @property
    def base_name(self) -> str:
        return self.served_name or self.base.resolve().name
