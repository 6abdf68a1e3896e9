//! Kernels with one deliberate bug each: the tests of the correct kernels detect every bug.

use std::panic::catch_unwind;

use crate::common::with_mutant;
use crate::{check_attention, heads_are_normalised_and_rotated, norms_of_residual_sums_are_those_of_f64};

const NORMS: &[&str] = &["add_layer_norm_f32", "add_layer_norm_bf16", "add_rms_norm_f32", "add_rms_norm_bf16"];
const LAYER_NORMS: &[&str] = &["add_layer_norm_f32"];
const ROPE: &[&str] = &["rope_f32"];
const ROPE_OF_16_BITS: &[&str] = &["rope_bf16"];
const PLAIN: &[&str] = &["attention_32_f32"];
const FLASH: &[&str] = &["attention_32_bf16"];

/// A bug, the kernels that have it, and the test that must detect it.
type Mutant = (&'static str, &'static [&'static str], fn());

fn attention() {
    check_attention(32, 2, 1, &[65, 3]);
}

/// The failure message of a test whose kernels have a bug.
fn failure_message(mutant: &'static str, kernels: &'static [&'static str], test: fn()) -> Option<String> {
    let panic = catch_unwind(|| with_mutant(mutant, kernels, test)).err()?;
    Some(panic.downcast_ref::<String>().cloned().unwrap_or_default())
}

#[test]
fn the_tests_see_mistakes() {
    let norms = norms_of_residual_sums_are_those_of_f64;
    let rope = heads_are_normalised_and_rotated;
    let mutants: [Mutant; 17] = [
        ("norm_reduction", NORMS, norms),
        ("norm_reduction", LAYER_NORMS, norms),
        ("norm_tail", NORMS, norms),
        ("norm_tail", LAYER_NORMS, norms),
        ("norm_race", NORMS, norms),
        ("norm_race", LAYER_NORMS, norms),
        ("rope_reduction", ROPE, rope),
        ("rope_reduction", ROPE_OF_16_BITS, rope),
        ("rope_tail", ROPE, rope),
        ("rope_tail", ROPE_OF_16_BITS, rope),
        ("attention_reduction", PLAIN, attention),
        ("attention_reduction", FLASH, attention),
        ("plain_tail", PLAIN, attention),
        ("plain_race", PLAIN, attention),
        ("plain_order", PLAIN, attention),
        ("flash_tail", FLASH, attention),
        ("flash_race", FLASH, attention),
    ];
    let end: Mutant = ("flash_end", FLASH, attention);
    for (mutant, kernels, test) in mutants.into_iter().chain([end]) {
        let failure_message =
            failure_message(mutant, kernels, test).unwrap_or_else(|| panic!("{mutant} in {kernels:?} is not seen"));
        println!("{mutant} in {kernels:?}: {failure_message}");
        // The test fails because of numbers, not because a kernel is missing.
        assert!(
            failure_message.contains(", not ") && failure_message.contains(" within "),
            "{mutant}: {failure_message}"
        );
    }
}

#[test]
fn the_same_tests_pass_without_a_mistake() {
    with_mutant("norm_race", &[], norms_of_residual_sums_are_those_of_f64);
    with_mutant("flash_race", &[], attention);
}
