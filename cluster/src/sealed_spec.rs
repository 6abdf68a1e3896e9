//! Encodes a run's [`TaskSpec`] and the build of the program that sent it, sealed with the cluster's token.
//!
//! ```text
//!   magic │ seal: HMAC(token, body), 32 bytes │ body: CBOR { build, order }
//! ```

use ciborium::{from_reader, into_writer};
use serde::{Deserialize, Serialize};
use stillhouse_pipeline::driver::{SplitTask, TaskSpec};

use crate::token::{Seal, Token};

/// This build: the program's version, a hash of the sources that decide the bytes of shards, and its features. A
/// cluster needs one build throughout.
pub const BUILD: &str = env!("STILLHOUSE_BUILD");

/// The first bytes of a `JobExec` node; no message of Ballista begins with them.
const MAGIC: &[u8] = b"\0stillhouse job 2\0";

#[derive(Serialize, Deserialize)]
struct Body {
    build: String,
    #[serde(rename = "order")]
    spec: TaskSpec,
}

/// Encodes and seals a task spec.
pub fn to_bytes(spec: &TaskSpec, token: &Token) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    into_writer(&Body { build: BUILD.into(), spec: spec.clone() }, &mut body).map_err(|e| e.to_string())?;
    Ok([MAGIC, &token.seal(&[&body]), &body].concat())
}

/// Whether the bytes begin as those of a sealed task spec.
pub fn is_sealed_spec(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// Decodes a task spec after it has checked, in this sequence, that this token sealed it and that this build sent it.
pub fn from_bytes(bytes: &[u8], token: &Token) -> Result<TaskSpec, String> {
    let refused_error = |why: String| format!("{why}; it is not executed");
    let sealed = bytes.strip_prefix(MAGIC).ok_or_else(|| refused_error("this is no job of Stillhouse".into()))?;
    let damaged_error = |e: &dyn std::fmt::Display| refused_error(format!("the job's bytes are damaged: {e}"));
    let (seal, body) = sealed.split_first_chunk::<{ size_of::<Seal>() }>().ok_or_else(|| damaged_error(&"too few"))?;
    if !token.verify(&[body], seal) {
        return Err(refused_error("the job does not come from a sender with this cluster's token".into()));
    }
    let BuildOnly { build } = from_reader(body).map_err(|e| damaged_error(&e))?;
    if build != BUILD {
        return Err(refused_error(format!("the job comes from stillhouse {build}, this is {BUILD}: another build")));
    }
    let body: Body = from_reader(body).map_err(|e| damaged_error(&e))?;
    Ok(body.spec)
}

/// The fields that the body of every build has.
#[derive(Deserialize)]
struct BuildOnly {
    build: String,
}

/// The seal of one split of a sealed task spec.
pub fn split_seal(sealed_spec: &[u8], split: &str, token: &Token) -> Seal {
    token.seal(&[sealed_spec, split.as_bytes()])
}

/// Encodes a split as JSON, for the row of its task.
pub fn split_to_json(split: &SplitTask) -> Result<String, String> {
    serde_json::to_string(split).map_err(|e| e.to_string())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub fn spec() -> TaskSpec {
        TaskSpec {
            spec: "{}".into(),
            base: "/jobs".into(),
            ticket: serde_json::from_str(r#"{"job_hash": "abc", "holder": "x"}"#).unwrap(),
            teacher: None,
            device: None,
        }
    }

    fn token(letter: &str) -> Token {
        Token::new(&letter.repeat(32))
    }

    #[test]
    fn an_order_comes_back_and_nothing_else_does() {
        let sealed = to_bytes(&spec(), &token("a")).unwrap();
        assert!(is_sealed_spec(&sealed) && !is_sealed_spec(b"\x0a\x02") && !is_sealed_spec(b""));
        assert_eq!(from_bytes(&sealed, &token("a")).unwrap(), spec());
        let says = |bytes: &[u8], token: &Token, why: &str| {
            let error = from_bytes(bytes, token).unwrap_err();
            assert!(error.contains(why) && error.ends_with("it is not executed"), "{error}");
        };
        says(&sealed, &token("b"), "not come from a sender with this cluster's token");
        says(b"select 1", &token("a"), "no job of Stillhouse");
        says(&sealed[..sealed.len() - 1], &token("a"), "not come from a sender");
        says(MAGIC, &token("a"), "damaged");
        for at in MAGIC.len()..sealed.len() {
            let mut other = sealed.clone();
            other[at] ^= 1;
            assert!(from_bytes(&other, &token("a")).is_err(), "byte {at}");
        }
    }

    #[test]
    fn another_build_is_named_before_its_order_is_looked_into() {
        let version = env!("CARGO_PKG_VERSION");
        let digits = BUILD.strip_prefix(version).and_then(|rest| rest.strip_prefix('+')).unwrap();
        assert!(digits.len() >= 12 && digits[..12].bytes().all(|b| b.is_ascii_hexdigit()), "{BUILD}");
        for build in ["9.9.9", version, &format!("{version}+0123456789ab")] {
            let mut body = Vec::new();
            into_writer(&serde_json::json!({"build": build, "order": "of another kind"}), &mut body).unwrap();
            let bytes = [MAGIC, &token("a").seal(&[&body]), &body].concat();
            let error = from_bytes(&bytes, &token("a")).unwrap_err();
            let says = format!("comes from stillhouse {build}, this is {BUILD}: another build");
            assert!(error.contains(&says), "{error}");
        }
    }
}
