"""Decoders of the DeepSeek V3 kind: their probes, dataflows, parameters, bounds and presets. No torch."""
