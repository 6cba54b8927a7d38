"""The engine over the device's model, in Triton's interpreter or on the device: mail, passes, whole generations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specter.errors import SpecterError
from specter.gpu.device_pass import DevicePasses
from specter.kernels import mail
from tests.kernels.test_gpu_decoder import DEVICE, SPEC, Models, models, tokens_of

__all__ = ["models"]  # the fixture
DEV = torch.device(DEVICE)


@pytest.mark.parametrize("size", [1, 17, 1024, 2500])
def test_mail_arrives_whole(size: int) -> None:
    sent = torch.arange(size, dtype=torch.int16, device=DEV)
    room = mail.room((size + 1,), torch.int16, DEV)
    mail.send(sent, room[:size])
    if DEV.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(room[:size], sent.cpu()) and room[size] == 0


def test_a_ring_keeps_its_order_however_far_the_device_lags() -> None:
    ring = mail.Ring(4, 5, DEV)
    received = []
    for turn in range(3):
        for index in range(3):  # ahead by three
            ring.write(-1, [index, 4], [10 * turn + index, 7])
        for index in range(3):
            ring.receive()
            expected = [-1, -1, -1, -1, 7]
            expected[index] = 10 * turn + index
            received.append(ring.row.tolist() == expected)
        if turn == 1:
            ring.restart()
    assert received == [True] * 9


def test_waves_from_the_host_are_the_resident_pass(models: Models) -> None:
    tokens, target = tokens_of(2).tolist(), models.target
    assert target.slot_table is not None
    resident = DevicePasses(target, is_resident=True).begin(tokens, 0, 2)
    assert resident.mix(SPEC.num_dense_layers) is None
    expected = list(resident.outputs())
    table = target.slot_table.cpu().numpy()
    one = DevicePasses(target).begin(tokens, 0, 2)
    for layer in range(SPEC.num_layers):
        routing = one.mix(layer)
        assert (routing is None) == (layer < SPEC.num_dense_layers)
        if routing is None:
            continue
        target.results.fill_(torch.nan)
        if DEV.type == "cuda":
            torch.cuda.synchronize()
        experts = np.unique(routing).tolist()
        for wave in (experts[::2], experts[1::2]):
            one.run_experts(layer, wave, table[layer - SPEC.num_dense_layers, wave].tolist())
        one.combine(layer)
    outputs = one.outputs()
    if DEV.type == "cuda":
        torch.cuda.synchronize()
    assert outputs.tolist() == expected
    assert DevicePasses(target, is_resident=True).begin(tokens, 0, 1).outputs().tolist() == expected[1:]


def test_a_pass_that_does_not_fit_is_refused(models: Models) -> None:
    with pytest.raises(SpecterError, match="49 rows"):
        DevicePasses(models.target).begin([1] * 49, 0, 1)
