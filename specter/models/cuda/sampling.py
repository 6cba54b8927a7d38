"""Sampling that the device can do inside a step."""

from __future__ import annotations

from dataclasses import dataclass

from specter.config import SamplingConfig
from specter.errors import SpecterError


@dataclass(frozen=True, slots=True)
class DeviceSampling:
    """The `seed` and `temperature` of draft and target; greedy if `temperature` is None."""

    seed: int = 0
    temperature: float | None = None

    @classmethod
    def of(cls, sampling: SamplingConfig) -> DeviceSampling:
        """Raises SpecterError: top-k, top-p or rejection sampling, which need logits on the host at every step."""
        if sampling.kind == "greedy":
            return cls()
        checks = {"kind": sampling.kind != "seeded", "top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1.0}
        given = [
            f"sampling.{name}={getattr(sampling, name)}" for name, is_unsupported in checks.items() if is_unsupported
        ]
        if given:
            raise SpecterError(
                f"{', '.join(given)} cannot be done inside a step on the device",
                "use sampling=greedy, or sampling=seeded with top_k=0 and top_p=1",
            )
        return cls(sampling.seed, sampling.temperature)


GREEDY = DeviceSampling()
