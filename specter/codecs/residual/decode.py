"""The strict reference decoder, in torch on any device: nothing is decoded that is not proven whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specter.codecs.residual.checksum import checksum
from specter.codecs.residual.fields import Levels, extension_widths, from_fields
from specter.codecs.residual.layout import CHECKSUM_WORDS, Header, Kind, Layout, Matrix, damaged
from specter.codecs.residual.resident import ResidentCodes, codes_checksum, layout_of, unpack_codes, unpack_params
from specter.codecs.residual.sizes import (
    BLOCK,
    BLOCK_SEGMENTS,
    ENTRY_WORDS,
    GUARD_WORDS,
    HEADER_WORDS,
    SEGMENT,
    aligned,
)
from specter.codecs.residual.windows import Windows, level_words
from specter.errors import SpecterError


def check_layer(blobs: Sequence[Tensor], codes: Sequence[ResidentCodes], names: Sequence[str]) -> list[Header]:
    """Proves that blobs are whole and belong to these codes; a decoder may then use them unchecked.

    Args:
        blobs: int32 [n] each, of all experts of a layer. codes: of the layer, leading dim E, on the same device.
        names: of the experts, for messages.

    Raises:
        SpecterError: naming the expert and what is wrong.
    """
    layout = layout_of(codes)
    headers = []
    for blob, codes_sum, name in zip(blobs, codes_checksum(codes).tolist(), names, strict=True):
        header = check_bytes(blob, layout, name)
        if codes_sum != header.codes_checksum:
            raise SpecterError(
                f"{name}: the residual belongs to other INT4 codes or scales, or these are damaged",
                "give the INT4 directory that the residual was encoded with, or encode it again",
            )
        headers.append(header)
    return headers


def check_blob(blob: Tensor, codes: Sequence[ResidentCodes], name: str) -> Header:
    """`check_layer` of one expert, whose codes have no leading dim. Raises SpecterError as that does."""
    return check_layer(
        [blob], [ResidentCodes(part.words[None], part.params[None], part.scale_dtype) for part in codes], [name]
    )[0]


def check_bytes(blob: Tensor, layout: Layout, name: str) -> Header:
    """`check_layer` of one blob, without its codes. Raises SpecterError naming the expert and what is wrong."""
    header = Header.unpack(blob, name)
    if header.num_words != len(blob):
        raise damaged(name, f"has {len(blob)} words, its header says {header.num_words}")
    if header.layout_digest != layout.digest:
        raise SpecterError(f"{name}: the residual is of an expert of other shapes", "give that of this very model")
    unsigned = blob.clone()
    unsigned[CHECKSUM_WORDS] = 0
    if int(checksum(unsigned)) != header.blob_checksum:
        raise damaged(name, "fails its checksum")
    if header.kind is Kind.RAW:
        if len(blob) != layout.raw_words or header.patch_offset or header.num_patches:
            raise damaged(name, "is raw and has a wrong size")
        return header
    _check_table(blob, header, layout, name)
    return header


def _check_table(blob: Tensor, header: Header, layout: Layout, name: str) -> None:
    end = HEADER_WORDS + ENTRY_WORDS * layout.num_blocks + 2
    if len(blob) < layout.stream_offset or bool(blob[end : layout.stream_offset].any()):
        raise damaged(name, "has a damaged table")
    starts, patches = (_column(blob, layout, column) for column in (0, 1))
    stream_end = layout.stream_offset + int(starts[-1])
    is_ordered = all(int(x[0]) == 0 and bool((x.diff() >= 0).all()) for x in (starts, patches))
    if not is_ordered or stream_end + GUARD_WORDS != header.patch_offset or int(patches[-1]) != header.num_patches:
        raise damaged(name, "has a table that does not fit its streams and patches")
    patch_end = header.patch_offset + header.num_patches
    if aligned(patch_end) != len(blob) or bool(blob[patch_end:].any()):
        raise damaged(name, "has another size than its patches say")
    if bool(blob[stream_end : header.patch_offset].any()):
        raise damaged(name, "has a stream that runs into its patches")


def decode(blob: Tensor, codes: Sequence[ResidentCodes], name: str) -> list[Tensor]:
    """The bf16 matrices [rows, columns] of one expert.

    Raises:
        SpecterError: as `check_blob`, or the streams do not end where the table says.
    """
    header, layout = check_blob(blob, codes, name), layout_of(codes)
    if header.kind is Kind.RAW:
        values = blob[HEADER_WORDS:].view(torch.bfloat16)[: layout.num_weights]
        sizes = [matrix.num_weights for matrix in layout.matrices]
        parts = zip(values.split(sizes), layout.matrices, strict=True)
        return [part.view(matrix.rows, matrix.columns).clone() for part, matrix in parts]
    matrices, first_block = [], 0
    for part in codes:
        matrices.append(_decode_matrix(blob, header, layout, part, first_block, name))
        first_block += part.matrix.num_blocks
    return matrices


def _decode_matrix(
    blob: Tensor, header: Header, layout: Layout, codes: ResidentCodes, first_block: int, name: str
) -> Tensor:
    """Segment by segment in parallel: int64 [segments, 512] throughout."""
    matrix, windows = codes.matrix, header.windows
    blocks = slice(first_block, first_block + matrix.num_blocks)
    starts, offsets = _column(blob, layout, 0), _offsets(blob, layout)[blocks]
    stream = blob[layout.stream_offset : header.patch_offset].long() & 0xFFFFFFFF
    begin = (starts[blocks, None] * 32 + offsets * 2).flatten()[:, None]
    words = _level_words(codes, matrix, windows)
    levels = Levels.of(words.view(-1, SEGMENT))
    is_weight = torch.arange(words.numel(), device=words.device).view(-1, SEGMENT) < matrix.num_weights
    width = levels.width * is_weight
    code = _read(stream, begin + width.cumsum(-1) - width, width, name)
    extension_width = extension_widths(code, levels, windows) * is_weight
    at_extension = begin + width.sum(-1, keepdim=True)
    extension = _read(stream, at_extension + extension_width.cumsum(-1) - extension_width, extension_width, name)
    end = at_extension + extension_width.sum(-1, keepdim=True)
    _check_ends(begin, end, starts[blocks.start : blocks.stop + 1], name)
    values = from_fields(code, extension, levels, windows).flatten()
    _patch(values, blob, header, layout, blocks, name, matrix)
    kept = values[: matrix.num_weights]
    return (kept << 16 >> 16).to(torch.int16).view(torch.bfloat16).view(matrix.rows, matrix.columns)


def _level_words(codes: ResidentCodes, matrix: Matrix, windows: Windows) -> Tensor:
    """int32 [blocks * 8192], padded with zeros."""
    levels = level_words(*unpack_params(codes.params.flatten(), codes.scale_dtype), windows)
    index = unpack_codes(codes.words.flatten()).view(-1, matrix.group).long()
    words = levels.gather(1, index).flatten()
    return torch.nn.functional.pad(words, (0, matrix.num_blocks * BLOCK - matrix.num_weights))


def _column(blob: Tensor, layout: Layout, column: int) -> Tensor:
    """One of the first two columns of the table, both ends included, int64 [blocks + 1]."""
    end = HEADER_WORDS + ENTRY_WORDS * layout.num_blocks + 2
    return blob[HEADER_WORDS + column : end : ENTRY_WORDS].long() & 0xFFFFFFFF


def _offsets(blob: Tensor, layout: Layout) -> Tensor:
    """int64 [blocks, 16], in units of two bits."""
    table = blob[HEADER_WORDS : HEADER_WORDS + ENTRY_WORDS * layout.num_blocks].view(-1, ENTRY_WORDS)[:, 2:].long()
    return torch.stack([table & 0xFFFF, table >> 16 & 0xFFFF], -1).flatten(1)


def _read(stream: Tensor, positions: Tensor, widths: Tensor, name: str) -> Tensor:
    """Unsigned fields of at most 16 bits, int32; nothing is read where the width is 0."""
    at = positions >> 5
    if bool((at[widths > 0] + 1 >= len(stream)).any()):
        raise damaged(name, "has a stream that runs past its end")
    at = at.clamp(max=len(stream) - 2)
    pair = stream[at] | stream[at + 1] << 32
    return ((pair >> (positions & 31)) & (1 << widths.long()) - 1).int()


def _check_ends(begin: Tensor, end: Tensor, starts: Tensor, name: str) -> None:
    """Each segment must end where the next begins, and each block's last one in its last word."""
    ends = (end + (end & 1)).view(-1, BLOCK_SEGMENTS)
    expected = torch.cat([begin.view(-1, BLOCK_SEGMENTS)[:, 1:], starts[1:, None] * 32], 1)
    fits = ends == expected
    fits[:, -1] = (ends[:, -1] + 31) >> 5 == starts[1:]
    if not bool(fits.all()) or not bool((begin.view(-1, BLOCK_SEGMENTS)[:, 0] == starts[:-1] * 32).all()):
        raise damaged(name, "has segments that do not end where the table says")


def _patch(
    values: Tensor, blob: Tensor, header: Header, layout: Layout, blocks: slice, name: str, matrix: Matrix
) -> None:
    ends = _column(blob, layout, 1)[blocks.start : blocks.stop + 1]
    begin = header.patch_offset
    patches = blob[begin + int(ends[0]) : begin + int(ends[-1])].long() & 0xFFFFFFFF
    block = torch.repeat_interleave(torch.arange(len(ends) - 1, device=blob.device), ends.diff())
    place = block * BLOCK + (patches >> 16)
    if bool((patches >> 16 >= BLOCK).any() | (place >= matrix.num_weights).any() | (place.diff() <= 0).any()):
        raise damaged(name, "has patches out of order or outside their block")
    values[place] = (patches & 0xFFFF).int()
