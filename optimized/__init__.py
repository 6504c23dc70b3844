"""DeepSeek V3.2 with its MTP layer as a serving engine runs it; ``optimized.subject`` is what spcheck runs."""
