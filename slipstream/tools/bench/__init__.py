"""Slipstream beside torch.distributed.pipelining, in one interleaved run: `slipstream bench`."""
