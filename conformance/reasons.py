"""Why a case of mergekit's own tests does not pass here: every one that does not, by its name.

A pattern is a case's name, in which `*` stands for anything.  `seen` is a regular expression for
what proves the reason: what pytest said of the case, or what the plan said of the merge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

Kind = Literal["no merge", "no device", "nothing proved", "insides", "refused", "different"]
"""What a case does that needs a reason: it merges nothing; it is skipped for want of a device; it
passes and proves nothing; it asks for what is no part of a merge; it is refused; it differs."""


@dataclass(frozen=True)
class Reason:
    """kind: as above. why: as the page says it. seen: in a failure; cases: patterns."""

    kind: Kind
    why: str
    seen: str
    cases: tuple[str, ...]

    def names(self, case: str) -> bool:
        """Whether a pattern is the case's."""
        return any(_fits(pattern, case) for pattern in self.cases)

    def explains(self, case: str, outcome: Mapping[str, Any]) -> bool:
        """Whether it is why this became of the case."""
        text = "\n".join((outcome["said"], *outcome["remarks"]))
        return (
            self.names(case)
            and self.kind in _kinds(outcome)
            and re.search(self.seen, text) is not None
        )

    def unused(self, cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """The patterns that no case needs."""
        explained = [case for case, outcome in cases.items() if self.explains(case, outcome)]
        return [
            pattern for pattern in self.cases if not any(_fits(pattern, case) for case in explained)
        ]


def passes(case: str, outcome: Mapping[str, Any]) -> bool:
    """Whether mstore merged, the case's assertions hold, and they are about the merge."""
    return _kinds(outcome) == ("nothing proved",) and not any(
        reason.kind == "nothing proved" and reason.names(case) for reason in REASONS
    )


def _kinds(outcome: Mapping[str, Any]) -> tuple[Kind, ...]:
    if outcome["outcome"] == "skipped":
        return ("no device",)
    if not outcome["merges"]:
        return ("no merge",)
    if outcome["outcome"] == "passed":
        return ("nothing proved",)
    return ("insides", "refused", "different")


def _fits(pattern: str, case: str) -> bool:
    # The brackets of a case's parameters are themselves.
    return fnmatchcase(case, pattern.replace("[", "[[]"))


_BASIC = "test_basic_merges.py::TestBasicMerges"
_BATCHED = "test_batched_merges.py"
_CONFIG = "test_config_parameters.py"
_DTYPES = "test_merge_dtypes.py"
_INTERFACE = "test_merge_method_interface.py"
_REGRESSIONS = "test_merge_method_regressions.py"
_SPARSIFY = "test_sparsify.py::TestMagnitude"
_TRUNCATION = "test_embedding_truncation.py"
_AXIS = "test_vocabulary_axis.py"

REASONS: tuple[Reason, ...] = (
    # -- no merge ----------------------------------------------------------------------------------
    Reason(
        "no merge",
        "architectures, task graph, reading and writing of files, names of models",
        "",
        (
            "test_architecture_conversion.py::*",
            "test_graph.py::*",
            "test_io.py::*",
            "test_lazy_unpickle.py::*",
            "test_modelref.py::*",
        ),
    ),
    Reason(
        "no merge",
        "how mergekit's methods are written, declared, called and batched",
        "",
        (
            "test_easy_define.py::*",
            f"{_BATCHED}::test_chunked_slerp_gradients",
            f"{_BATCHED}::test_constrained_non_base_coefficients_accept_empty_axis",
            f"{_BATCHED}::test_constraints_survive_both_signature_adapters",
            f"{_BATCHED}::test_direct_kernels_accept_strided_inputs[*]",
            f"{_BATCHED}::test_group_method_receives_metadata_and_borrowed_inputs",
            f"{_BATCHED}::test_integer_coefficient_boundaries_pack_exactly[*]",
            f"{_BATCHED}::test_integer_coefficients_overflow_before_any_kernel[*]",
            f"{_BATCHED}::test_native_signature_rejects_group_annotations",
            f"{_BATCHED}::test_non_base_coefficients_cannot_use_an_ignored_base_contract",
            f"{_BATCHED}::test_non_base_coefficients_follow_canonical_layout[cpu]",
            f"{_BATCHED}::test_options_are_validated_before_execution",
            f"{_BATCHED}::test_singleton_batches_borrow_strided_inputs[*]",
            f"{_DTYPES}::test_direct_call_validates_dtype_before_execution[*]",
            f"{_DTYPES}::test_dtype_intermediates_released_between_chunks[cpu-*]",
            f"{_DTYPES}::test_linear_scratch_is_bounded_independently_of_input_count[*]",
            f"{_INTERFACE}::test_config_parameter_carrier_preserves_scalar_types",
            f"{_INTERFACE}::test_construction_and_registration_are_independent",
            f"{_INTERFACE}::test_contract_validates_entire_batch_before_math_runs",
            f"{_INTERFACE}::test_execution_controls_do_not_reserve_algorithm_parameter_names",
            f"{_INTERFACE}::test_explicit_per_group_parameter_values",
            f"{_INTERFACE}::test_group_adapter_validates_every_group_before_execution[*]",
            f"{_INTERFACE}::test_group_kernel_must_preserve_weight_shape",
            f"{_INTERFACE}::test_group_sequence_checks_all_element_types_before_execution[*]",
            f"{_INTERFACE}::test_kernel_wrappers_do_not_reserve_algorithm_parameter_names[*]",
            f"{_INTERFACE}::test_per_input_values_are_ordered_and_shape_checked[*]",
            f"{_INTERFACE}::test_plain_annotations_preserve_constraints_defaults_and_requiredness[*]",
            f"{_INTERFACE}::test_signature_infers_parameter_scopes_and_accepts_shared_lists",
            f"{_INTERFACE}::test_signature_rejects_missing_or_ambiguous_parameter_types[*]",
            f"{_REGRESSIONS}::test_fusion_exact_quantiles_and_threshold",
            f"{_REGRESSIONS}::test_fusion_sampling_has_bounded_allocations",
            f"{_REGRESSIONS}::test_graph_rejects_incompatible_loaded_tensors[*]",
            f"{_REGRESSIONS}::test_optional_inputs_keep_their_model_ids_and_coefficients",
            f"{_REGRESSIONS}::test_optional_weight_cannot_silently_drop_a_configured_base[*]",
        ),
    ),
    Reason(
        "no merge",
        "single functions that resolve parameters (`conformance/test_recipes.py` compares those)",
        "",
        (
            f"{_CONFIG}::test_gradient_constraints_validate_endpoints",
            f"{_CONFIG}::test_gradient_interpretation_uses_declared_type[*]",
            f"{_CONFIG}::test_invalid_defaults_fail_during_parameter_resolution",
            f"{_CONFIG}::test_precedence_and_distinct_input_output_tensor_names[*]",
            f"{_CONFIG}::test_scientific_notation_gradients_at_every_config_level[*]",
            f"{_CONFIG}::test_single_conditional_parameter_and_filter_fallback",
        ),
    ),
    Reason(
        "no merge",
        "single functions that align or cut embeddings",
        "",
        (
            f"{_AXIS}::test_alignment_*",
            f"{_AXIS}::test_inference_marks_only_vocabulary_parameters_and_their_actual_aliases",
            f"{_AXIS}::test_metadata_rejects_invalid_axes[*]",
            f"{_AXIS}::test_static_metadata_excludes_vision_and_normalization[*]",
            f"{_AXIS}::test_tokensurgeon_distinguishes_matrices_from_bias_and_remaps_auxiliaries",
            f"{_AXIS}::test_transform_rejects_axis_outside_tensor_rank[*]",
            f"{_AXIS}::test_transformers_inference_detects_tied_vocabulary_aliases[*]",
            f"{_AXIS}::test_truncation_borrows_slices_on_vocabulary_axis[*]",
            f"{_AXIS}::test_unknown_weight_metadata_is_rejected_instead_of_silently_ignored[*]",
            f"{_DTYPES}::test_embedding_alignment_promotes_before_copying",
            f"{_TRUNCATION}::test_invalid_embedding_shapes[*]",
            f"{_TRUNCATION}::test_noop_and_non_embeddings",
        ),
    ),
    # -- no device ---------------------------------------------------------------------------------
    Reason(
        "no device",
        "the same cases on a GPU, which mstore does not use",
        "(CUDA|MPS) unavailable",
        (
            "*[cuda]",
            "*[cuda-*]",
            f"{_BATCHED}::test_linear_singleton_peak_memory[*]",
            f"{_BATCHED}::test_native_merges_on_mps[*]",
            f"{_BATCHED}::test_slerp_large_weight_has_bounded_inference_scratch",
            f"{_REGRESSIONS}::test_fusion_releases_importance_scratch_before_thresholding",
        ),
    ),
    # -- nothing proved ----------------------------------------------------------------------------
    Reason(
        "nothing proved",
        "measures torch's memory",
        "",
        (f"{_REGRESSIONS}::test_task_arithmetic_peak_memory",),
    ),
    # -- insides -----------------------------------------------------------------------------------
    Reason(
        "insides",
        "asks for gradients: mstore merges stored models",
        "mstore has no gradients",
        (
            f"{_BATCHED}::test_graph_adapter_preserves_optional_singleton_fallback[bfloat16-None-*]",
            f"{_BATCHED}::test_native_kernels_keep_autograd_and_borrowed_inputs[cpu-*]",
            f"{_DTYPES}::test_incremental_dtype_conversion_preserves_autograd[cpu-None]",
            f"{_INTERFACE}::test_module_inputs_preserve_parameter_gradients[*]",
            f"{_REGRESSIONS}::test_karcher_below_tolerance_keeps_zero_gradients[cpu-*]",
            f"{_REGRESSIONS}::test_karcher_differentiates_output_scale[cpu-dtype0]",
            f"{_TRUNCATION}::test_explicit_preprocessing_preserves_inputs_and_identity",
        ),
    ),
    Reason(
        "insides",
        "watches mergekit's own batches, buffers or devices, or wants its own objects back",
        r"assert \[\] ==|assert set\(\) ==|is tensor\(|meta tensor|2 values of weight for 1",
        (
            f"{_BATCHED}::test_different_dtypes_and_input_counts_partition_batches",
            f"{_BATCHED}::test_graph_adapter_preserves_optional_singleton_fallback[None-None-*]",
            f"{_BATCHED}::test_later_invalid_group_fails_before_any_kernel[device]",
            f"{_BATCHED}::test_linear_buckets_options_shapes_and_restores_order[cpu]",
            f"{_BATCHED}::test_packing_budget_and_oversized_singletons[*]",
            f"{_INTERFACE}::test_none_input_ids_are_rejected_at_every_entry_point",
        ),
    ),
    Reason(
        "insides",
        "lists every parameter of mergekit's method, also those that mstore does not have",
        "int8_mask|nuslerp_ro",
        (
            f"{_CONFIG}::test_raw_and_yaml_parameter_resolution_agree[*-nuslerp]",
            f"{_CONFIG}::test_raw_and_yaml_parameter_resolution_agree[*-ties]",
        ),
    ),
    # -- refused -----------------------------------------------------------------------------------
    Reason(
        "refused",
        "`nuslerp_row_wise` with `nuslerp_flatten: false`: columns",
        "nuslerp_row_wise turns columns",
        (
            f"{_BASIC}::test_nuslerp_*",
            f"{_REGRESSIONS}::test_nuslerp_mixed_collinear_rows_have_finite_gradients[cpu-True]",
            f"{_REGRESSIONS}::test_strided_nuslerp_modes[True-False-*]",
        ),
    ),
    Reason(
        "refused",
        "`float64` as the type of arithmetic or output",
        "float64 is not supported",
        (
            f"{_BATCHED}::test_graph_adapter_preserves_optional_singleton_fallback[*-float64-*]",
            f"{_DTYPES}::test_direct_and_state_dict_calls_share_dtype_policy[out_dtype1-*]",
            f"{_DTYPES}::test_incremental_dtype_conversion_preserves_autograd[cpu-dtype1]",
            f"{_DTYPES}::test_raw_graph_dtype_policy[*-float64-*]",
            f"{_DTYPES}::test_raw_graph_merges_batchnorm_without_casting_buffers[*]",
            f"{_INTERFACE}::test_merge_tensors_aligns_parameters_and_preserves_gradients[*]",
        ),
    ),
    Reason(
        "refused",
        "`rescale` for methods that do not draw",
        "(ties|breadcrumbs) does not rescale",
        (
            f"{_REGRESSIONS}::test_task_arithmetic_values_and_gradients[True-breadcrumbs*]",
            f"{_REGRESSIONS}::test_task_arithmetic_values_and_gradients[True-ties]",
            f"{_SPARSIFY}::test_empty_tensor[l*]",
            f"{_SPARSIFY}::test_norm_rescale",
            f"{_SPARSIFY}::test_zero_density[l*]",
        ),
    ),
    Reason(
        "refused",
        "a `select_topk` of 0, a `t` of `slerp` outside of 0 to 1",
        r"select_topk must be in \(0, 1\].*not 0.0|parameter t must be in \[0, 1\]",
        (
            f"{_BATCHED}::test_slerp_mixed_geometries_varying_coefficients_and_base_order[cpu-*]",
            f"{_INTERFACE}::test_sce_zero_variance_preserves_shape[0.0-*]",
        ),
    ),
    Reason(
        "refused",
        "embeddings of different sizes cut to the shortest, without their tokenizers",
        "lm_head.* has shape",
        (
            f"{_AXIS}::test_phi_truncation_handles_output_bias",
            f"{_TRUNCATION}::test_embedding_and_head_are_truncated_independently",
            f"{_TRUNCATION}::test_missing_tokenizer_does_not_prevent_truncation",
            f"{_TRUNCATION}::test_truncation_copies_out_of_range_metadata[*]",
            f"{_TRUNCATION}::test_truncation_preserves_donor_config[*]",
        ),
    ),
    Reason(
        "refused",
        "models that do not have the same tensors",
        "only_a is missing",
        (
            f"{_DTYPES}::test_raw_graph_missing_tensors[intersection-*]",
            f"{_DTYPES}::test_raw_graph_missing_tensors[union-*]",
        ),
    ),
    Reason(
        "refused",
        "`linear` with weights that add up to zero",
        "weights of linear add up to zero",
        (
            f"{_BATCHED}::test_linear_zero_weight_sum_follows_tensor_division[cpu-*]",
            f"{_BATCHED}::test_state_dict_per_group_values_keep_alignment_across_buffers",
        ),
    ),
    Reason(
        "refused",
        "fp64 tensors that differ",
        "elements of F64 cannot be merged",
        (
            f"{_BATCHED}::test_float_coefficients_follow_input_precision[cpu-dtype3-*]",
            f"{_BATCHED}::test_linear_weighted_sum_and_normalization[cpu-*-dtype3]",
            f"{_DTYPES}::test_direct_and_state_dict_calls_share_dtype_policy[None-*]",
            f"{_DTYPES}::test_raw_graph_dtype_policy[*-None-*]",
            f"{_DTYPES}::test_state_dict_promotes_each_weight_independently[*]",
            f"{_INTERFACE}::test_model_stock_singularity_retains_base_with_finite_gradients[*]",
            f"{_REGRESSIONS}::test_karcher_differentiates_output_scale[cpu-dtype1]",
            f"{_REGRESSIONS}::test_nuslerp_mixed_collinear_rows_have_finite_gradients[cpu-False]",
            f"{_REGRESSIONS}::test_spherical_merge_gradients_match_*[cpu-karcher-*]",
            f"{_REGRESSIONS}::test_spherical_merge_gradients_match_*[cpu-nuslerp-2-*]",
            f"{_REGRESSIONS}::test_task_arithmetic_values_and_gradients[*]",
            f"{_SPARSIFY}::test_small_tensor_retains_largest_value[*-dtype3-*]",
        ),
    ),
    # -- different ---------------------------------------------------------------------------------
    Reason(
        "different",
        "arithmetic is float32 and the output has the base's type, where mergekit has its `dtype` "
        "for both, or the widest of the models' types",
        "assert 1004.0 == 1000.0|torch.bfloat16 (!=|==) torch.float32",
        (
            f"{_DTYPES}::test_input_cast_and_output_cast_have_distinct_numerics",
            f"{_DTYPES}::test_yaml_mixed_checkpoint_precisions[None-None]",
        ),
    ),
)
