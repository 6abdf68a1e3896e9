//! If the bits of a pass depend on the machine's instructions, the teacher's reported arithmetic differs too.
//!
//! A process can imitate only one type of machine. The test therefore runs its own executable once per type, with fewer
//! instructions allowed.

use std::collections::BTreeMap;
use std::process::Command;

use stillhouse_teacher::{Precision, cpu_arithmetic};

use crate::{MODELS, expected, floats, rows, teacher, testdata};

const DTYPES: [Precision; 4] = [Precision::F32, Precision::Bf16, Precision::F16, Precision::Bf16x3];

/// Prints what the test below compares; that test starts it for each type of machine.
#[test]
#[ignore = "a part of another test"]
fn tells_what_it_computes() {
    for (model, dtype) in MODELS.iter().flat_map(|model| DTYPES.map(|dtype| (model, dtype))) {
        let (teacher, expected) = (teacher(model, dtype), expected(model));
        assert_eq!(cpu_arithmetic(&testdata(model), dtype, &[]).unwrap(), teacher.info().arithmetic);
        let hidden = teacher.hidden(&expected.tokens, expected.batch, expected.length).unwrap();
        let logits = floats(&teacher.logits(&rows(&hidden)).unwrap());
        // FNV-1a
        let hash = |hash: u64, logit: &f32| (hash ^ u64::from(logit.to_bits())).wrapping_mul(0x100_0000_01b3);
        let bits = logits.iter().fold(0xcbf2_9ce4_8422_2325, hash);
        println!("told\t{model} {dtype}\t{}\t{bits:016x}", teacher.info().arithmetic);
    }
}

#[test]
fn what_has_other_bits_has_another_name() {
    let mut found: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    for machine in ["", "avx2+fma", "baseline"] {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "levels::tells_what_it_computes", "--ignored", "--nocapture"]);
        let ran = command.env("STILLHOUSE_TEST_CPU", machine).output().unwrap();
        let text = String::from_utf8(ran.stdout).unwrap();
        assert!(ran.status.success(), "{text}{}", String::from_utf8_lossy(&ran.stderr));
        let told = text.lines().filter_map(|line| line.split_once("told\t")?.1.split_once('\t'));
        for (what, told) in told {
            let (name, bits) = told.split_once('\t').unwrap();
            let other = found.entry(what.into()).or_default().insert(name.into(), bits.into());
            assert!(other.is_none_or(|other| other == bits), "{what}: {name} has other bits on {machine:?}");
        }
    }
    assert!(found.len() >= MODELS.len() * 4, "{found:?}");
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // Otherwise the test could not detect a missing name.
        let differ = |of: &BTreeMap<String, String>| of.values().collect::<std::collections::BTreeSet<_>>().len() > 1;
        assert!(found.values().all(differ), "{found:?}");
    }
}
