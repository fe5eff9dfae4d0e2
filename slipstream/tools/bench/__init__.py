"""`slipstream bench`: compares slipstream with torch.distributed.pipelining in one interleaved run."""
