"""The tests that `make longer` has and `make test` has not, because others of each commit assert the same of another
family, layout or algorithm. `make faults` looks at the tests of each commit alone: what it plants is noticed there.
"""

import re
from collections.abc import Set

COVERING = {
    *("qwen3", "qwen3_moe", "llama", "granitemoehybrid", "gemma4_text", "lfm2_moe", "qwen3_5_text", "falcon_h1"),
    *("mimo_v2_flash", "glm_moe_dsa", "deepseek_v3", "gpt_oss", "afmoe", "helium", "olmo_hybrid", "phi3"),
    *("deepseek_v32", "kimi_linear", "nemotron", "nemotron_h"),
}
"""Families that together have every fact of `Family`; tests of every family run for them in each commit."""

TEMPLATES = {
    *("qwen3", "qwen3_training", "qwen3_6", "qwen3_vl", "gptoss", "llama3_2", "glm4moe", "gemma4_v5", "deepseekv3"),
    *("lfm2_2_5", "nemotron_3_nano", "cohere2", "phi3_5", "smolvlm"),
}
"""Chat templates, one or two of each developer."""

ALL: tuple[str, ...] = ()

WHOLE_FILES = {
    "distributed/engine/test_reference_weights.py",
    "distributed/lora/test_vision.py",
    "distributed/model/test_compiled.py",
    "distributed/parallel/test_scale.py",
    "distributed/policy/test_golden_layouts.py",
    "distributed/ray/test_job.py",
    "distributed/serve/test_all_weights.py",
    "distributed/serve/test_teachers.py",
    "distributed/serve/test_vllm.py",
    "distributed/test_laptop.py",
    "distributed/trainers/test_chaos.py",
    "distributed/trainers/test_fuzz.py",
    "distributed/trainers/test_joined_generators.py",
    "unit/rollout/agents/test_real_clients.py",
}
"""Files of which each commit has no test."""

BY_FILE: dict[str, dict[str, tuple[str, ...] | Set[str]]] = {
    "distributed/checkpoint/test_failures.py": {
        "test_one_rank_that_cannot_write_is_known_to_the_program": ALL,
        "test_auto_goes_back_to_the_checkpoint_before_a_damaged_one": ("flipped byte",),
        "test_a_full_disk_leaves_training_and_older_checkpoints_intact": ("True",),
    },
    "distributed/checkpoint/test_state.py": {
        "test_a_checkpoint_goes_on_on_another_layout": ALL,
        "test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit": ("pp2 tied",),
    },
    "distributed/checkpoint/test_storage.py": {
        "test_a_rank_reads_what_it_holds_from_the_files_that_have_it": ("{'pp': 2, 'dp_shard'",),
        "test_shards_are_those_of_dcp_and_each_is_written_by_one_rank": ("deepseek_v3", "{'pp': 2, 'tp'"),
    },
    "distributed/encoder/test_media_encoder.py": {
        "test_ranks_of_later_stages_wait_for_no_encoder": ALL,
    },
    "distributed/engine/test_accumulation.py": {
        "test_several_calls_and_one_optimizer_step_are_those_of_plain_transformers": ("[one]", "pp2 tied"),
        "test_trainings_that_take_turns_are_those_that_are_alone": ALL,
    },
    "distributed/engine/test_engine.py": {
        "test_what_is_saved_gives_the_logits_of_the_trained_handle": ("pp2-tied", "pp2 dp2-untied"),
        "test_forward_only_work_sees_the_weights_of_its_time": ("pp2",),
        "test_a_loss_that_is_not_finite_skips_the_step_on_every_rank": ("pp2",),
    },
    "distributed/engine/test_rollout_offload.py": {
        "test_offloading_changes_no_number": ALL,
    },
    "distributed/launch/test_failures.py": {
        "test_the_job_ends_soon_and_one_block_names_rank_host_phase_and_cause": ("launcher1",),
    },
    "distributed/lora/test_folders.py": {
        "test_training_goes_on_as_with_peft": ("two names-qwen3-",),
        "test_merged_weights_are_those_of_peft": ("two names-qwen3-", "of experts-gpt_oss", "lengths of rows"),
    },
    "distributed/lora/test_lora.py": {
        "test_adapters_are_merged_on_every_rank_as_in_files": ("llama-sizes4", "qwen3_moe"),
        "test_training_and_files_are_those_of_peft": ("model5-", "model13-"),
        "test_peft_computes_with_the_files_what_was_trained": (
            "qwen3_moe",
            "gpt_oss",
            "deepseek_v3",
            "falcon_h1",
            "gemma4_text",
            "qwen3_5_text",
        ),
    },
    "distributed/lora/test_nf4.py": {
        "test_training_is_that_of_peft_on_dequantized_weights": ("sizes0-",),
        "test_no_plain_weight_is_kept_for_the_backward": ("memory0",),
        "test_every_kind_of_layer_computes_with_dequantized_weights": ("falcon_h1", "phi3"),
        "test_split_layers_compute_with_dequantized_weights": ALL,
    },
    "distributed/lora/test_nf4_experts.py": {
        "test_mixtures_train_as_with_dequantized_weights": ("qwen3_moe-sizes0", "gpt_oss-sizes4"),
    },
    "distributed/lora/test_stored_base.py": {
        "test_training_is_that_on_plain_weights": ("[fp8-{}-{}]",),
        "test_compiled_layers_compute_alike": ALL,
    },
    "distributed/losses/test_losses.py": {
        "test_layouts_compute_the_loss_of_one_process": ("dpo-{'pp'", "gspo-{'dp_shard'"),
        "test_recomputed_logprobs_are_exactly_those_of_the_first_update": ("pp",),
    },
    "distributed/mixture/test_router_replay.py": {
        "test_uneven_virtual_stages_of_27_layers_map_by_number": ALL,
        "test_27_layers_of_which_the_first_is_dense_map_by_number": ALL,
        "test_layouts_with_routes_equal_one_process": ("ZBV",),
        "test_gradients_equal_those_of_one_rank": ("{'pp': 2}-full", "cp"),
    },
    "distributed/model/test_audio.py": {
        "test_a_model_that_hears_equals_one_process": ("cp, frozen",),
        "test_a_model_with_two_encoders_equals_one_process": ALL,
        "test_the_thinker_of_a_whole_model_is_trained_and_the_rest_is_kept": ALL,
    },
    "distributed/model/test_changed_weights.py": {
        "test_every_trained_weight_changes_and_comes_back": (
            "[{}-bfloat16",
            "{'pp': 2}-float64",
            "{'tp': 2}-bfloat16",
            "'ep': 2}-float64",
        ),
    },
    "distributed/model/test_classifiers.py": {
        "test_a_family_scores_as_in_transformers": COVERING,
    },
    "distributed/model/test_composites.py": {
        "test_the_language_model_is_trained_and_the_rest_is_kept": ("kimi",),
    },
    "distributed/model/test_exchanged_heads.py": {
        "test_exchanged_heads_equal_one_process": ALL,
    },
    "distributed/model/test_frozen_weights.py": {
        "test_frozen_weights_stay_as_they_are_loaded": ("{'pp': 2}-qwen3_next",),
    },
    "distributed/model/test_gemma4.py": {
        "test_small_models_equal_one_process": ("[{}-",),
        "test_small_models_see_images_as_one_process": ("cp",),
    },
    "distributed/model/test_indexer_loss.py": {
        "test_layouts_equal_transformers": ("deepseek_v32-{}-", "deepseek_v32-{'cp'"),
    },
    "distributed/model/test_memory.py": {
        "test_recomputation_and_offloading_take_place_and_change_no_number": ("sizes0",),
        "test_mlps_in_tiles_train_the_same": ALL,
        "test_mlps_in_tiles_train_the_same_in_compiled_layers": ALL,
    },
    "distributed/model/test_mtp.py": {
        "test_layouts_equal_transformers_module": ("deepseek_v3-{}", "mimo_v2_flash-{'pp'", "qwen3_5_text"),
    },
    "distributed/model/test_precision.py": {
        "test_gradients_of_rows_and_ranks_add_up_in_float32": ("[{}]", "{'pp': 2, 'dp"),
        "test_updates_that_bfloat16_would_lose_are_kept_in_float32": ("[{}]",),
    },
    "distributed/model/test_quantized.py": {
        "test_a_quantized_model_trains_as_its_plain_copy_does": ("gpt_oss",),
    },
    "distributed/model/test_token_mixers.py": {
        "test_other_sizes_equal_one_process": ALL,
    },
    "distributed/model/test_vision.py": {
        "test_any_layout_of_either_module_equals_one_process": ALL,
        "test_images_that_are_seen_both_ways_equal_one_process": ALL,
        "test_features_that_enter_several_layers_equal_one_process": ALL,
        "test_another_encoder_equals_one_process": ALL,
        "test_modules_on_meshes_of_their_own_equal_one_process": ("llava-vision one rank on ranks 0, language pp 2",),
        "test_rows_of_images_with_breaks_equal_one_process": ALL,
        "test_frozen_parts_leave_the_others_right": ALL,
        "test_both_modules_on_all_ranks_equal_one_process": ALL,
        "test_encoder_ranks_with_unequal_images_of_any_size_wait_for_nobody": ALL,
        "test_a_language_model_with_latent_attention_equals_one_process": ALL,
        "test_a_checkpoint_moves_between_placements_bit_for_bit": ("vision tp 2",),
        "test_encoder_ranks_without_images_wait_for_nobody_and_change_no_scale": ("images_of1",),
    },
    "distributed/optimizers/test_adamw_8bit.py": {
        "test_layouts_equal_one_process": ALL,
    },
    "distributed/optimizers/test_checkpoints.py": {
        "test_a_checkpoint_goes_on_on_another_layout": (
            "muon-auto-momentum_buffer-qwen3-",
            "adamw_8bit-bfloat16-exp_avg_sq_root-qwen3_moe",
        ),
    },
    "distributed/optimizers/test_muon.py": {
        "test_layouts_equal_one_process": ALL,
        "test_an_encoder_on_a_mesh_of_its_own_equals_one_process": ALL,
    },
    "distributed/optimizers/test_rounded_masters.py": {
        "test_layouts_equal_one_process": ("{'pp': 2}-adamw_8bit",),
        "test_gradients_and_moments_stay_wide": ("reduce",),
        "test_an_encoder_on_a_mesh_of_its_own_equals_one_process": ALL,
    },
    "distributed/parallel/test_host_collectives.py": {
        "test_every_rank_gets_what_all_have": ("[3]", "[4]"),
    },
    "distributed/parallel/test_parity.py": {
        "test_families_of_every_kind_equal_one_process_on_other_layouts": ("gpt_oss-{'cp'",),
        "test_families_of_mixtures_that_follow_routes_equal_one_process": ALL,
        "test_layouts_of_a_mixture_equal_one_process": ("{'cp': 2, 'tp': 2",),
        "test_layouts_of_a_dense_model_equal_one_process": ("{'pp': 2, 'tp'",),
        "test_thirteen_stages_of_2_layers_and_one_of_1_equal_one_process": ALL,
        "test_four_stages_of_7_6_8_and_6_layers_equal_one_process": ALL,
        "test_mixtures_of_nemo_automodel_equal_one_process": ALL,
        "test_the_auxiliary_loss_of_mixtures_equals_one_process": ALL,
        "test_27_layers_as_13_and_14_equal_one_process": ALL,
        "test_dense_families_equal_one_process": ("1-False-qwen2", "1-True-llama", "2-True-qwen3"),
        "test_every_other_family_equals_one_process": COVERING,
        "test_classes_of_nemo_automodel_equal_one_process": ALL,
        "test_any_number_of_microbatches_equals_one_process": ("[5]",),
        "test_every_schedule_equals_one_process": ("[Interleaved1F1B", "ZBV"),
        "test_schedules_of_a_mixture_over_cp_and_ep_equal_one_process": ALL,
    },
    "distributed/parallel/test_receive_buffers.py": {
        "test_more_microbatches_need_no_more_buffers": ("[1F1B]",),
    },
    "distributed/parallel/test_resharding.py": {
        "test_layouts_equal_one_process": ALL,
        "test_recomputed_layers_equal_one_process": ALL,
        "test_layouts_that_only_reduce_each_microbatch_equal_one_process": ALL,
        "test_units_are_gathered_no_oftener_than_they_are_needed": ("reshard",),
    },
    "distributed/policy/test_crew.py": {
        "test_every_rank_gets_its_share_and_answers": ("[3]", "[5]"),
    },
    "distributed/policy/test_given_ids.py": {
        "test_given_ids_are_scored_and_trained_as_by_transformers": ("dp and pp",),
    },
    "distributed/policy/test_policy.py": {
        "test_results_are_those_of_an_engine_in_the_order_of_the_rows": ("three data ranks",),
    },
    "distributed/policy/test_scores.py": {
        "test_scores_and_steps_are_those_of_transformers": ("dp and tp",),
    },
    "distributed/serve/test_openai.py": {
        "test_completions_are_those_of_the_model": ALL,
    },
    "distributed/serve/test_serve.py": {
        "test_runs_go_on_from_saved_weights_after_a_rank_and_after_the_server_is_killed": ALL,
    },
    "distributed/serve/test_soft_targets.py": {
        "test_soft_targets_train_as_plain_transformers_do": ALL,
    },
    "distributed/serve/test_together.py": {
        "test_compiled_layers_take_each_microbatchs_gate": ALL,
        "test_runs_that_meet_get_what_they_get_alone": ALL,
    },
    "distributed/step/test_failed_steps.py": {
        "test_a_loss_that_raises_and_is_caught_leaves_no_trace": (
            "Interleaved1F1B', 'virtual_stages': 2}-float64-(0,)",
        ),
        "test_values_that_are_not_finite_are_compared_like_others": ("nan",),
        "test_token_ids_outside_the_vocabulary_are_refused_on_every_rank": ("{'tp': 2}-128", "{'dp_shard': 2}--1]"),
        "test_gradients_are_had_by_hugging_face_names": ("{'pp': 2}-mixtral",),
    },
    "distributed/step/test_several_runners.py": {
        "test_runners_take_turns_on_one_model": ("an encoder beside",),
    },
    "distributed/tools/test_export.py": {
        "test_both_formats_are_written": ALL,
        "test_the_last_checkpoint_exports_to_what_the_run_has_saved": ("adapters",),
    },
    "distributed/tools/test_init.py": {
        "test_a_written_config_is_commented_and_trains": ("grpo",),
    },
    "distributed/tools/test_plan.py": {
        "test_a_thousand_ranks_take_seconds": ALL,
        "test_bytes_are_those_of_a_run": ("sizes0",),
        "test_bytes_of_an_encoder_are_those_of_a_run": ("llava",),
        "test_the_bubble_is_the_textbooks": ("2-8-GPipe", "4-8-1F1B", "4-8-Inter"),
        "test_a_layout_that_wastes_time_is_told_of_a_faster_one": ALL,
        "test_other_layouts_are_shown_fastest_first_and_in_seconds": ALL,
        "test_what_is_left_open_is_decided_so_that_it_fits": ALL,
        "test_estimates_are_near_what_was_measured": ALL,
    },
    "distributed/tools/test_untrained_tensors.py": {
        "test_exports_of_a_pipeline_keep_every_tensor": ("deepseek_v3",),
    },
    "distributed/tools/test_verify.py": {
        "test_planted_bugs_show_where_they_strike": ("documents see each other-qwen3",),
        "test_planted_bugs_of_modules_show_where_they_strike": ALL,
        "test_sound_layouts_are_equal": ALL,
        "test_modules_of_a_config_get_a_verdict": ALL,
        "test_a_family_that_is_not_in_the_table_is_tried_with_the_facts_of_one_that_is": ALL,
        "test_a_config_with_an_encoder_of_audio_gets_a_verdict": ALL,
        "test_sequences_are_on_both_sides_of_where_rotary_embeddings_are_scaled": ("yarn",),
    },
    "distributed/tools/test_verify_bf16.py": {
        "test_errors_of_bf16_are_those_of_rounding": ("None-qwen3_moe",),
        "test_the_verdict_is_also_about_the_step_in_bf16": ALL,
    },
    "distributed/trainers/test_adapters.py": {
        "test_grpo_goes_on_with_the_adapters_of_sft_or_with_the_merged_model": ALL,
        "test_dropout_is_drawn_again_where_a_run_resumes": ALL,
        "test_a_run_on_adapters_resumes_on_these_adapters_alone": ALL,
        "test_a_step_with_adapters_exports_merged": ALL,
    },
    "distributed/trainers/test_agents.py": {
        "test_branching_agents_train_alike_on_every_layout_with_every_generator": ALL,
        "test_loss_and_gradient_of_branches_are_those_of_their_rows_by_hand": ("[pp]",),
        "test_many_agents_of_which_one_sleeps_do_not_wait_for_each_other": ALL,
        "test_an_agent_trains_what_an_environment_does": ALL,
    },
    "distributed/trainers/test_audio.py": {
        "test_an_algorithm_trains_alike_on_any_placement": ALL,
    },
    "distributed/trainers/test_batch_epochs.py": {
        "test_every_pass_trains_each_completion_once_in_other_company": ALL,
    },
    "distributed/trainers/test_conversations.py": {
        "test_odd_environments_cost_their_conversations": ALL,
        "test_layouts_and_generators_write_and_train_the_same": ("{'dp_shard'",),
    },
    "distributed/trainers/test_distill.py": {
        "test_a_student_learns_as_by_transformers": ("the teacher's likeliest-one rank",),
        "test_a_small_student_comes_close_to_its_teacher": ALL,
        "test_a_model_is_its_own_perfect_teacher": ALL,
        "test_each_source_has_its_own_teacher": ALL,
    },
    "distributed/trainers/test_dpo.py": {
        "test_a_reference_computed_before_is_that_of_every_step": ALL,
        "test_runs_that_keep_no_second_weights": ALL,
        "test_it_starts_at_ln_2_and_learns_the_same_on_a_pipeline": ALL,
    },
    "distributed/trainers/test_evaluations.py": {
        "test_a_run_is_more_patient_than_its_evaluations": ALL,
        "test_evaluations_measure_the_model_that_generators_have": ALL,
        "test_a_harness_that_fails_or_hangs_costs_its_metrics_alone": ("no such task",),
    },
    "distributed/trainers/test_evaluators.py": {
        "test_an_evaluator_and_a_run_that_are_killed_lose_no_validation": ALL,
        "test_a_validation_whose_weights_are_gone_is_left_out_with_a_warning": ALL,
        "test_they_find_what_validation_as_usual_finds_while_training_goes_on": ALL,
    },
    "distributed/trainers/test_grpo.py": {
        "test_rollouts_tell_advantages_and_both_log_probabilities": ALL,
        "test_old_logprobs_are_left_out_where_they_are_those_of_the_step": ALL,
        "test_sequences_are_trained_with_the_advantages_of_their_rewards": ("temperature",),
        "test_adapters_may_reach_the_generator_alone": ALL,
        "test_rewards_teach_the_tokens_where_the_policy_is_most_uncertain": ALL,
        "test_on_policy_needs_no_logprobs_from_before": ALL,
        "test_a_loss_of_the_config_takes_the_place_of_grpos": ALL,
    },
    "distributed/trainers/test_grpo_generators.py": {
        "test_a_run_with_generators_ahead_goes_on_with_the_prompts_it_had_not_trained_on": ALL,
        "test_a_generator_that_dies_in_validation_loses_no_step": ALL,
        "test_a_generator_that_stays_dead_ends_the_run_with_nothing_lost": ALL,
        "test_it_does_not_matter_in_which_process_the_generator_is": ALL,
        "test_the_others_write_what_a_dead_generator_was_to_write": ALL,
        "test_a_generator_that_does_not_come_back_is_left_out_while_others_write": ALL,
        "test_ranks_that_share_a_generator_leave_the_writing_to_the_first": ALL,
        "test_a_generator_that_dies_ahead_of_training_does_not_make_the_others_completions_older": ALL,
        "test_a_generator_that_dies_is_started_again": ALL,
    },
    "distributed/trainers/test_grpo_rewards.py": {
        "test_empty_completions_are_rewarded_and_count_no_tokens": ALL,
        "test_rewards_that_teach_nothing_end_the_run": ALL,
        "test_groups_without_signal_are_replaced": ALL,
    },
    "distributed/trainers/test_kto.py": {
        "test_it_learns_as_by_transformers": ("one rank",),
        "test_good_completions_gain_and_bad_ones_lose": ALL,
    },
    "distributed/trainers/test_loops.py": {
        "test_the_loops_of_the_examples_learn_and_on_two_ranks_as_on_one": ALL,
        "test_loops_that_distil_do_so_on_two_ranks_as_on_one": ALL,
        "test_losses_of_a_programs_own_file_go_to_all_ranks": ALL,
    },
    "distributed/trainers/test_ppo.py": {
        "test_it_learns_what_rewards_want": ALL,
        "test_a_run_goes_on_from_the_newest_checkpoint_with_a_whole_critic": ALL,
        "test_a_resumed_run_has_its_critic_again": ALL,
        "test_a_critic_warms_up_alone_and_may_wait_on_the_host": ALL,
        "test_every_layout_trains_policy_and_critic_alike": ("pp",),
    },
    "distributed/trainers/test_published.py": {
        "test_a_full_disk_ends_no_run": ALL,
        "test_every_optimizer_step_is_a_version_and_the_last_is_the_final_model": ALL,
    },
    "distributed/trainers/test_real_vllm.py": {
        "test_a_run_that_stops_and_loses_its_vllm_goes_on_to_the_same_losses": ALL,
        "test_the_exported_layer_drafts_as_it_was_trained": ALL,
        "test_servers_get_the_weights_too": ALL,
        "test_adapters_alone_are_applied_as_they_are_trained": ALL,
        "test_conversations_go_on_with_answers_of_an_environment": ALL,
        "test_several_replicas_write_what_one_writes": ALL,
        "test_families_of_every_kind_are_sampled_from_as_they_are_trained": ALL,
        "test_pictures_are_seen_as_in_training": ALL,
        "test_drafted_tokens_have_the_probabilities_of_the_model": ALL,
    },
    "distributed/trainers/test_remote_teachers.py": {
        "test_it_judges_what_a_policy_writes": ALL,
        "test_a_teacher_behind_vllm_teaches_what_it_does_on_the_ranks": ALL,
        "test_a_teacher_behind_tinkers_api_teaches_what_it_does_on_the_ranks": ALL,
        "test_bad_input_is_one_line_and_writes_nothing": ("api is for", "servers return", "use tokens_of"),
        "test_what_servers_cannot_tell_is_one_line": ALL,
    },
    "distributed/trainers/test_resume.py": {
        "test_a_run_may_go_on_from_any_checkpoint_in_a_folder_of_its_own": ALL,
        "test_a_run_whose_first_step_failed_is_begun_anew": ALL,
        "test_a_run_saves_and_stops_before_its_time_is_up": ALL,
        "test_ranks_that_an_agent_starts_again_go_on_by_themselves": ALL,
        "test_a_run_whose_terminal_is_closed_saves_and_stops": ALL,
        "test_a_finished_run_stays_as_it_is": ("checkpoints-sft",),
        "test_a_model_that_is_missing_or_of_an_earlier_end_is_written": ALL,
        "test_a_resumed_run_may_learn_at_another_rate": ALL,
        "test_epochs_that_are_done_are_told_as_steps_are": ALL,
    },
    "distributed/trainers/test_reward.py": {
        "test_it_learns_as_transformers_does_on_every_layout": ALL,
        "test_adapters_keep_their_head_for_peft": ALL,
    },
    "distributed/trainers/test_reward_models.py": {
        "test_a_policy_learns_what_a_reward_model_prefers": ALL,
        "test_a_chat_is_scored_alone_and_among_others_alike": ALL,
    },
    "distributed/trainers/test_router_replay.py": {
        "test_routes_of_batches_that_generators_in_processes_wrote_ahead_are_followed": ALL,
        "test_a_pipeline_with_replay_follows_one_process": ALL,
        "test_branches_of_agents_follow_the_experts_of_the_turns_that_they_share": ALL,
        "test_conversations_follow_the_experts_of_each_turn": ALL,
        "test_tokens_without_a_route_may_choose_by_themselves": ALL,
        "test_ranks_whose_generators_wrote_nothing_still_train": ALL,
        "test_completions_whose_routes_cannot_be_followed_leave_their_groups": ALL,
        "test_routes_that_cannot_be_followed_end_the_run_on_every_rank": ALL,
    },
    "distributed/trainers/test_sft.py": {
        "test_a_run_leaves_metrics_report_and_a_model_that_transformers_opens": ("list",),
        "test_a_job_of_another_size_is_refused": ALL,
        "test_a_run_goes_on_on_another_layout": ALL,
        "test_the_last_checkpoints_and_the_best_are_kept": ALL,
        "test_groups_of_parameters_learn_at_their_own_rates": ALL,
        "test_a_finished_run_goes_on_when_its_limit_is_raised": ALL,
    },
    "distributed/trainers/test_teachers.py": {
        "test_a_divergence_from_the_teacher_over_own_completions": ALL,
        "test_what_a_teacher_adds_is_added_to_rewards": ALL,
        "test_a_policy_comes_close_to_its_teacher_without_rewards": ALL,
        "test_a_divergence_is_added_to_what_rewards_teach": ALL,
    },
    "distributed/trainers/test_vision.py": {
        "test_rewards_of_pictures_are_learned_from_alike_on_any_placement": ALL,
        "test_adapters_learn_from_rewards_of_pictures_and_go_on_elsewhere": ALL,
        "test_pairs_with_pictures_train_alike_on_any_placement": ALL,
        "test_a_run_goes_on_with_the_modules_on_other_ranks": ALL,
        "test_placements_train_alike_and_leave_a_model_that_transformers_opens": ALL,
        "test_videos_are_seen_alike_by_generator_and_trainer": ("qwen2_5_vl",),
        "test_a_generator_in_a_process_of_its_own_gets_pictures": ALL,
    },
    "distributed/trainers/test_weight_probe.py": {
        "test_right_weights_pass": ALL,
        "test_noise_explains_more_than_what_is_known_of_other_models": ALL,
        "test_a_run_says_once_that_the_probe_cannot_tell": ALL,
        "test_right_weights_pass_with_adapters_and_in_another_process": ALL,
        "test_a_weight_that_stays_as_in_the_checkpoint_stops_the_run_before_its_first_step": (
            "model.norm",
            "embed_tokens",
        ),
        "test_a_weight_that_stays_later_stops_the_run_in_the_next_step": ALL,
    },
    "distributed/weight_sync/test_failures.py": {
        "test_an_generator_that_is_lost_in_a_sync_is_noticed_and_replaced": ALL,
        "test_slow_generators_and_any_number_of_buffers": ("1-ipc", "4-collective"),
        "test_checksums_notice_a_bucket_that_did_not_arrive": ("ipc",),
    },
    "distributed/weight_sync/test_published.py": {
        "test_every_version_is_what_a_whole_weight_sync_sends": ("qwen3_moe",),
    },
    "distributed/weight_sync/test_split_engine.py": {
        "test_every_worker_gets_every_byte_and_failures_reach_all_ranks": ("pp",),
    },
    "distributed/weight_sync/test_sync.py": {
        "test_every_layout": ALL,
        "test_adapters": ("{'pp': 2}-alone", "{'dp_shard': 2}-merged"),
        "test_ways_and_dtypes": ("collective",),
    },
    "unit/compat/test_compilation.py": {
        "test_what_is_compiled_is_kept_where_a_restart_of_the_machine_leaves_it": ALL,
    },
    "unit/data/test_stock_templates.py": {
        "test_no_text_of_an_answer_is_left_out_without_a_word": TEMPLATES,
        "test_turns_are_those_that_marks_of_the_same_template_name": TEMPLATES,
        "test_a_turn_begins_where_a_prompt_ends_and_ends_where_a_generator_stops": TEMPLATES,
        "test_a_content_that_is_null_or_missing_is_an_empty_one": TEMPLATES,
    },
    "unit/estimate/test_activations.py": {
        "test_layers_of_every_family_are_measured": COVERING,
    },
    "unit/few_bits/test_stochastic_rounding.py": {
        "test_a_compiler_makes_the_same_numbers": ALL,
    },
    "unit/generators/test_transformers_generator.py": {
        "test_completions_of_any_family_that_end_apart_go_on_alone": COVERING,
    },
    "unit/generators/test_vllm_versions.py": {
        "test_the_installed_version_is_as_it_is_used": ALL,
    },
    "unit/hf/test_read.py": {
        "test_a_model_is_read_as_transformers_reads_it": COVERING,
        "test_names_and_tensors_of_files_come_back": COVERING,
    },
    "unit/model/test_logprobs.py": {
        "test_memory_is_a_tenth_of_the_naive_way": ALL,
    },
    "unit/model/test_tiled_mlp.py": {
        "test_a_recomputed_layer_computes_its_mlp_once_in_the_forward_and_once_in_the_backward": ("False",),
    },
    "unit/optimizers/test_own_steps.py": {
        "test_a_compiled_step_is_the_same": ALL,
        "test_weights_in_bfloat16_learn_by_small_steps": ("adamw_8bit",),
    },
    "unit/optimizers/test_roles.py": {
        "test_modules_and_uses_tell_the_same_roles": COVERING,
    },
    "unit/report/test_browser.py": {
        "test_a_phone_sees_whole_charts": ALL,
        "test_a_timeline_shows_who_works_when": ALL,
        "test_agents_show_their_turns_as_a_tree": ALL,
        "test_runs_that_are_compared_show_what_differs_in_their_configs": ALL,
        "test_metrics_of_any_name_are_shown": ALL,
        "test_long_names_stay_in_their_cards": ALL,
        "test_charts_of_nothing_but_zeros_are_a_line_until_they_are_asked_for": ALL,
        "test_the_last_and_the_best_values_are_at_the_top": ALL,
        "test_controls_change_what_is_drawn": ALL,
        "test_rollouts_are_side_by_side_and_filtered": ALL,
        "test_conversations_show_their_turns_and_what_is_not_trained": ALL,
        "test_a_failure_is_at_the_top_and_the_config_below": ALL,
    },
    "unit/rollout/agents/test_agents.py": {
        "test_two_hundred_agents_of_which_a_tenth_is_odd_end_and_leave_nothing": ALL,
        "test_an_agent_that_fails_leaves_its_group_or_gets_a_reward": ("works alone",),
        "test_what_an_agent_does_is_a_completion_with_its_reward": ("when waited for",),
        "test_an_agent_without_a_reward_is_judged_by_other_rewards": ("works alone",),
        "test_a_client_that_asks_again_gets_the_answer_that_was_under_way": ("works alone",),
        "test_a_flood_of_calls_is_refused_after_the_limit": ("works alone",),
        "test_one_that_waits_does_not_hold_up_others": ("when waited for",),
        "test_an_error_that_is_not_the_agents_reaches_the_run": ("works alone",),
    },
    "unit/serve/test_page.py": {
        "test_the_page_shows_runs_and_what_waits": ("1280",),
    },
    "unit/test_package.py": {
        "test_importing_the_library_prints_nothing": ALL,
    },
    "unit/tools/test_doctor.py": {
        "test_an_environment_with_vllm_is_looked_at": ALL,
    },
    "unit/tools/test_recipes.py": {
        "test_recipes_fit_their_devices": ("qwen3_30b_a3b-grpo", "llama3_70b_nf4-grpo"),
    },
}
"""Tests by file and name, and what stays in each commit: parts of the ids, or a set of which an id names one. None
stays with `ALL`."""

LONGER = {f"{file}::{test}": stays for file, tests in BY_FILE.items() for test, stays in tests.items()}


def is_longer(name: str) -> bool:
    """Whether a test belongs to `make longer`.

    Args:
        name: the test's id, below `tests/`.
    """
    function, _, parameters = name.partition("[")
    if function.partition("::")[0] in WHOLE_FILES:
        return True
    stays = LONGER.get(function)
    if stays is None:
        return False
    if isinstance(stays, Set):
        return stays.isdisjoint(re.split("[] -]", parameters))
    return not any(part in f"[{parameters}" for part in stays)
