"""What fits where, the bytes that a token moves, and which K pays: from a configuration, without loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from specter.cli.choice import Choice, configure
from specter.generation import GREEDY
from specter.memory import DoesNotFit, device_bytes
from specter.resolve import ResolvedRun, resolve
from specter.timeline.costs import CostModel
from specter.timeline.hardware import Hardware

COMPARED = ("lru", "specter_deadline", "specter_plus")
LENS = (0, 2, 4, 8, 16, 32)
PART_NAMES = {
    "shared": "attention, shared experts, embedding, head",
    "kv": "KV cache",
    "draft": "INT4 copy of the routed experts",
    "draft_shared": "the draft's own other weights",
    "draft_kv": "the draft's own KV cache",
    "buffer": "spare expert buffers",
    "staging": "decoded experts",
    "tail": "ends of residual experts longer than a slot",
    "slot": "slots for experts",
}


@dataclass(frozen=True, slots=True)
class Expectation:
    """A round of K draft tokens, if the router chose experts evenly and the draft were right with a fixed probability.

    A text's routing is more even over time and less even over experts than this; measured runs load fewer experts.
    """

    k: int
    tokens: float  # committed
    loads: float  # experts
    bytes_per_token: float
    link_ms: float  # per token
    device_ms: float  # per token

    @property
    def ms(self) -> float:
        """Per token, with copies beside the work of the device."""
        return max(self.link_ms, self.device_ms)


def expect(run: ResolvedRun, k: int, acceptance: float) -> Expectation:
    """The expectation of a depth. `acceptance`: of one draft token."""
    costs, hardware, spec = run.costs, run.config.hardware, run.spec
    tokens = k + 1.0 if acceptance == 1 else (1 - acceptance ** (k + 1)) / (1 - acceptance)
    union = spec.num_experts * (1 - (1 - spec.top_k / spec.num_experts) ** (k + 1))
    absent = 1 - run.num_slots / (spec.num_moe_layers * spec.num_experts)
    loads = union * absent * spec.num_moe_layers
    num_bytes = loads * costs.payload_bytes
    return Expectation(
        k=k,
        tokens=tokens,
        loads=loads,
        bytes_per_token=num_bytes / tokens,
        link_ms=loads * hardware.copy_ns(costs.payload_bytes) / 1e6 / tokens,
        device_ms=_round_ns(costs, hardware, k, round(union)) / 1e6 / tokens,
    )


def _round_ns(costs: CostModel, hardware: Hardware, k: int, num_experts: int) -> int:
    """Device time of a round whose layers use `num_experts` experts each."""
    spec, tiles = costs.spec, costs.num_tiles(k + 1)
    works = [costs.attend_and_route(layer, tiles) for layer in range(spec.num_layers)]
    works += [costs.experts(num_experts, tiles), costs.combine(tiles)] * spec.num_moe_layers
    if costs.decodes:
        works += [costs.decode(num_experts)] * spec.num_moe_layers
    return sum(map(hardware.compute_ns, [*works, costs.head(k + 1), *[costs.draft_step()] * k]))


def expectations(run: ResolvedRun, acceptance: float) -> list[Expectation]:
    """One per depth that the system can have."""
    lens = LENS if run.config.system.speculative else (0,)
    return [expect(run, k, acceptance) for k in lens if k <= run.config.max_len]


def residency_table(run: ResolvedRun) -> Table:
    """Where the model's bytes lie."""
    config, spec = run.config, run.spec
    device, capacity = config.hardware, config.hardware.device_memory_bytes
    table = Table(title=f"{spec.name} with {config.system.name} on {device.title or device.name}", title_justify="left")
    table.add_column("on the device")
    table.add_column("GB", justify="right")
    for part, num_bytes in device_bytes(run.costs, config.system, run.slots).items():
        if num_bytes:
            table.add_row(PART_NAMES[part], f"{num_bytes / 1e9:.2f}")
    total = int(run.fit()["device_total_bytes"])
    state = "fits" if total <= capacity else "does NOT fit"
    table.add_section()
    table.add_row(f"in all: {state} {capacity / 1e9:.1f} GB", f"{total / 1e9:.2f}")
    num_experts = spec.num_moe_layers * spec.num_experts
    per_layer = run.num_slots / spec.num_moe_layers
    form = f"{run.bits_per_weight:.1f} bits per weight" if run.costs.decodes else "16 bits per weight"
    table.add_row(f"experts with a slot: {per_layer:.1f} of {spec.num_experts} a layer, {form}", "")
    host = num_experts * run.costs.payload_bytes
    table.add_row("all experts in host memory", f"{host / 1e9:.2f}")
    return table


def depth_table(run: ResolvedRun, acceptance: float) -> Table:
    """What a token is expected to move and take, by depth; the best is marked."""
    found = expectations(run, acceptance)
    best = min(found, key=lambda one: one.ms)
    link = run.config.hardware.link_bytes_per_s / 1e9
    table = Table(
        title=f"Expected, for evenly chosen experts, acceptance {acceptance:g}, a link of {link:.1f} GB/s",
        caption="not measured: real routing repeats itself, and moves less. K = 0 is plain decoding",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("K", "tokens a round", "MB a token", "link, ms a token", "device, ms a token", ""):
        table.add_column(name, justify="right")
    for one in found:
        table.add_row(
            str(one.k), f"{one.tokens:.1f}", f"{one.bytes_per_token / 1e6:.0f}", f"{one.link_ms:.1f}",
            f"{one.device_ms:.1f}", "best" if one is best else "",
        )  # fmt: skip
    return table


def comparison_table(runs: Sequence[ResolvedRun], acceptance: float) -> Table:
    """Systems beside each other: their slots and their best depth."""
    table = Table(title="Systems within this budget", title_justify="left")
    for name in ("system", "device GB", "experts a layer", "best K", "MB a token", "ms a token"):
        table.add_column(name, justify="left" if name == "system" else "right")
    for run in runs:
        best = min(expectations(run, acceptance), key=lambda one: one.ms)
        table.add_row(
            run.config.system.name, f"{int(run.fit()['device_total_bytes']) / 1e9:.1f}",
            f"{run.num_slots / run.spec.num_moe_layers:.1f}", str(best.k), f"{best.bytes_per_token / 1e6:.0f}",
            f"{best.ms:.1f}",
        )  # fmt: skip
    return table


def plan(choice: Choice, num_tokens: int, acceptance: float, console: Console) -> None:
    """Prints the plan of one system, or of those compared and of the best of them.

    Args:
        num_tokens: of the longest prompt with its continuation. acceptance: assumed, of one draft token.
    Raises SpecterError: as `configure`; DoesNotFit: no system fits.
    """
    names = COMPARED if choice.system is None else (choice.system,)
    runs = []
    for name in names:
        try:
            config = configure(replace(choice, system=name), console, num_tokens, GREEDY, is_plan=True)
            runs.append(resolve(config))
        except DoesNotFit as error:
            if name == names[-1] and not runs:
                raise
            console.print(f"{name}: {error.what}")
    best = min(runs, key=lambda run: min(one.ms for one in expectations(run, acceptance)))
    for run in runs:
        if (bits := run.config.payload_bits) is not None:
            console.print(f"{run.config.system.name}: no residual experts yet; {bits:g} bits per weight are assumed")
    if len(runs) > 1:
        console.print(comparison_table(runs, acceptance))
    console.print(residency_table(best))
    console.print(depth_table(best, acceptance))
