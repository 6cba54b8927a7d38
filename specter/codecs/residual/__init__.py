"""The residual codec: a BF16 expert as what its resident INT4 codes leave open. docs/codec.md describes it.

| module | content |
|---|---|
| `resident` | INT4 codes, scales and zeros as they lie on the device |
| `windows` | the BF16 values that a code, scale and zero allow, and how they are numbered |
| `layout` | byte layout of a blob: offsets follow from the shapes |
| `checksum` | 64-bit checksums, computed on any device |
| `encode`, `decode` | the encoder and the strict reference decoder, in torch |

Residual directories are in `specter.quantize.residual`; the fast decoder is `specter.kernels.residual`.
"""
