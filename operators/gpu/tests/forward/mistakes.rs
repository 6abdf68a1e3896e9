//! Kernels with one deliberate bug each: the tests of the correct kernels detect every bug.

use std::panic::catch_unwind;

use crate::common::with_mistake;
use crate::{check_attention, heads_are_normalised_and_rotated, norms_of_residual_sums_are_those_of_f64};

const NORMS: &[&str] = &["add_layer_norm_f32", "add_layer_norm_bf16", "add_rms_norm_f32", "add_rms_norm_bf16"];
const LAYER_NORMS: &[&str] = &["add_layer_norm_f32"];
const ROPE: &[&str] = &["rope_f32"];
const ROPE_OF_16_BITS: &[&str] = &["rope_bf16"];
const PLAIN: &[&str] = &["attention_32_f32"];
const FLASH: &[&str] = &["attention_32_bf16"];

/// A bug, the kernels that have it, and the test that must detect it.
type Mistake = (&'static str, &'static [&'static str], fn());

fn attention() {
    check_attention(32, 2, 1, &[65, 3]);
}

/// The failure message of a test whose kernels have a bug.
fn said(mistake: &'static str, kernels: &'static [&'static str], test: fn()) -> Option<String> {
    let told = catch_unwind(|| with_mistake(mistake, kernels, test)).err()?;
    Some(told.downcast_ref::<String>().cloned().unwrap_or_default())
}

#[test]
fn the_tests_see_mistakes() {
    let norms = norms_of_residual_sums_are_those_of_f64;
    let rope = heads_are_normalised_and_rotated;
    let mistakes: [Mistake; 17] = [
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
    let end: Mistake = ("flash_end", FLASH, attention);
    for (mistake, kernels, test) in mistakes.into_iter().chain([end]) {
        let said = said(mistake, kernels, test).unwrap_or_else(|| panic!("{mistake} in {kernels:?} is not seen"));
        println!("{mistake} in {kernels:?}: {said}");
        // The test fails because of numbers, not because a kernel is missing.
        assert!(said.contains(", not ") && said.contains(" within "), "{mistake}: {said}");
    }
}

#[test]
fn the_same_tests_pass_without_a_mistake() {
    with_mistake("norm_race", &[], norms_of_residual_sums_are_those_of_f64);
    with_mistake("flash_race", &[], attention);
}
