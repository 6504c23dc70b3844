"""Small configs for the oracle tests, as the objects of published config.json files."""

from typing import Any

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 256,
    "rope_parameters": YARN,
    "tie_word_embeddings": False,
}
INDEXER = {"index_n_heads": 16, "index_head_dim": 20, "index_topk": 6}


def raw_config(model_type: str = "deepseek_v32", **changes: object) -> dict[str, Any]:
    return {"model_type": model_type, **BASE, **(INDEXER if model_type == "deepseek_v32" else {}), **changes}
