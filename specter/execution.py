"""How a run executes: what is fused, captured and overlapped. Options other than the default show what each gains."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specter.errors import SpecterError

# The routing that a replayed draft shows to the planner: its own; the target's; numbers moved by half of the experts.
ROUTES = DRAFTED, PERFECT, WRONG = "drafted", "perfect", "wrong"


@dataclass
class ExecutionConfig:
    """Options of the device runtime; the virtual clock charges the default, `by_expert`, and those of a replay."""

    fused: bool = True  # the draft's experts run in the fused INT4 kernels; otherwise in plain torch
    by_expert: bool = False  # the fused kernels are launched once per chosen expert, instead of once for all of a layer
    graphs: bool = True  # passes and draft steps are captured as CUDA graphs
    overlap: bool = True  # copies run beside compute; False issues both to one stream
    stress_seed: int | None = None  # delays and reorders copies at random, to test losslessness (timeline/stress.py)
    by_token: bool = False  # verification runs the experts of one token after the other; virtual clock only
    routes: str = DRAFTED  # one of ROUTES; in replays only

    @property
    def label(self) -> str:
        """What differs from the default, for names of runs; empty for the default."""
        switches = {
            "unfused": not self.fused,
            "by_expert": self.by_expert,
            "ungraphed": not self.graphs,
            "serial": not self.overlap,
            "by_token": self.by_token,
            f"{self.routes}_routes": self.routes != DRAFTED,
        }
        stress = [] if self.stress_seed is None else [f"stress{self.stress_seed}"]
        return "-".join([name for name, is_on in switches.items() if is_on] + stress)

    @property
    def needs_device(self) -> bool:
        """Whether only the device clock can time it."""
        return replace(self, by_expert=False, by_token=False, routes=DRAFTED) != ExecutionConfig()


def check_execution(execution: ExecutionConfig, clock: str) -> None:
    """Raises SpecterError for options that exclude each other, or that the clock cannot time."""
    if execution.routes not in ROUTES:
        raise SpecterError(f"execution.routes={execution.routes!r} is unknown", f"use one of: {', '.join(ROUTES)}")
    if clock == "device" and (execution.by_token or execution.routes != DRAFTED):
        raise SpecterError(f"execution ({execution.label}) is charged and not run", "set clock=virtual")
    if clock == "virtual" and execution.needs_device:
        raise SpecterError(
            f"execution ({execution.label}) changes what a device does, and clock=virtual charges the default",
            "set clock=device, or execution=default",
        )
    if execution.by_expert and not execution.fused:
        raise SpecterError(
            "execution.by_expert launches the fused kernels one by one, and execution.fused=false uses none",
            "set one of the two",
        )
    if execution.stress_seed is not None and not execution.overlap:
        raise SpecterError(
            "execution.stress_seed reorders copies, and execution.overlap=false issues them in order",
            "set one of the two",
        )
