//! Encodes an order: a run's job and the build of the program that sent it, sealed with the cluster's token.
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
    order: TaskSpec,
}

/// Encodes and seals an order.
pub fn to_bytes(order: &TaskSpec, token: &Token) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    into_writer(&Body { build: BUILD.into(), order: order.clone() }, &mut body).map_err(|e| e.to_string())?;
    Ok([MAGIC, &token.seal(&[&body]), &body].concat())
}

/// Whether the bytes begin as those of an order.
pub fn is_order(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// Decodes an order after it has checked, in this sequence, that this token sealed it and that this build sent it.
pub fn from_bytes(bytes: &[u8], token: &Token) -> Result<TaskSpec, String> {
    let refused = |why: String| format!("{why}; it is not executed");
    let sealed = bytes.strip_prefix(MAGIC).ok_or_else(|| refused("this is no job of Stillhouse".into()))?;
    let damaged = |e: &dyn std::fmt::Display| refused(format!("the job's bytes are damaged: {e}"));
    let (seal, body) = sealed.split_first_chunk::<{ size_of::<Seal>() }>().ok_or_else(|| damaged(&"too few"))?;
    if !token.sealed(&[body], seal) {
        return Err(refused("the job was not sent by somebody with this cluster's token".into()));
    }
    let Sender { build } = from_reader(body).map_err(|e| damaged(&e))?;
    if build != BUILD {
        return Err(refused(format!("the job comes from stillhouse {build}, this is {BUILD}: another build")));
    }
    let body: Body = from_reader(body).map_err(|e| damaged(&e))?;
    Ok(body.order)
}

/// The fields that the order of every build has.
#[derive(Deserialize)]
struct Sender {
    build: String,
}

/// The seal of one split of an order.
pub fn seal_of(order: &[u8], wanted: &str, token: &Token) -> Seal {
    token.seal(&[order, wanted.as_bytes()])
}

/// Encodes a split as JSON, for the row of its task.
pub fn wanted_to_text(wanted: &SplitTask) -> Result<String, String> {
    serde_json::to_string(wanted).map_err(|e| e.to_string())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub fn order() -> TaskSpec {
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
        let sent = to_bytes(&order(), &token("a")).unwrap();
        assert!(is_order(&sent) && !is_order(b"\x0a\x02") && !is_order(b""));
        assert_eq!(from_bytes(&sent, &token("a")).unwrap(), order());
        let says = |bytes: &[u8], token: &Token, why: &str| {
            let refused = from_bytes(bytes, token).unwrap_err();
            assert!(refused.contains(why) && refused.ends_with("it is not executed"), "{refused}");
        };
        says(&sent, &token("b"), "not sent by somebody with this cluster's token");
        says(b"select 1", &token("a"), "no job of Stillhouse");
        says(&sent[..sent.len() - 1], &token("a"), "not sent by somebody");
        says(MAGIC, &token("a"), "damaged");
        for at in MAGIC.len()..sent.len() {
            let mut other = sent.clone();
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
            let refused = from_bytes(&bytes, &token("a")).unwrap_err();
            let says = format!("comes from stillhouse {build}, this is {BUILD}: another build");
            assert!(refused.contains(&says), "{refused}");
        }
    }
}
