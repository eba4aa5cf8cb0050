"""The CUDA caching allocator, simulated: settings, segments, blocks, and the replay of a trace."""
