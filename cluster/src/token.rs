//! The secret that a cluster shares, and the proofs computed with it: HMAC-SHA256 (RFC 2104).
//!
//! ```text
//!   HMAC(K, m) = H((K ⊕ opad) ‖ H((K ⊕ ipad) ‖ m))      H = SHA-256, blocks of 64 bytes, K hashed if longer
//! ```
//!
//! The secret itself is never sent.

use std::fmt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use stillhouse_pipeline::error::{ErrorKind, PipelineError, Result};
use subtle::ConstantTimeEq;

/// The environment variable that holds the secret.
pub const TOKEN: &str = "STILLHOUSE_CLUSTER_TOKEN";
/// The environment variable with the path of a file that holds the secret.
pub const TOKEN_FILE: &str = "STILLHOUSE_CLUSTER_TOKEN_FILE";

/// Fewest characters of a token, so that it cannot be guessed: 128 bits in hexadecimal.
const MIN_CHARS: usize = 32;
const BLOCK_BYTES: usize = 64;

/// The secret of a cluster, as an HMAC key.
#[derive(Clone, PartialEq, Eq)]
pub struct Token([u8; BLOCK_BYTES]);

/// The HMAC of some bytes under a token.
pub type Seal = [u8; 32];

impl Token {
    /// Reads the token: from `file` if given, else from the file or the text in the environment.
    ///
    /// # Errors
    /// When there is no token, its file cannot be read, or it is too short.
    pub fn load(file: Option<&Path>) -> Result<Self> {
        let usage = |message: String| PipelineError::new(ErrorKind::Usage, message);
        // the error hides a path from the environment, because all users of a service can read the errors of its jobs
        let named = file.map(|file| (file.to_owned(), file.display().to_string()));
        let from_environment =
            || std::env::var_os(TOKEN_FILE).map(|file| (PathBuf::from(file), format!("the file of {TOKEN_FILE}")));
        let (text, from) = match (named.or_else(from_environment), std::env::var(TOKEN)) {
            (Some((file, shown)), _) => {
                let text = std::fs::read_to_string(&file);
                (text.map_err(|e| usage(format!("cannot read the cluster's token from {shown}: {e}")))?, shown)
            }
            (None, Ok(text)) => (text, TOKEN.to_owned()),
            (None, Err(_)) => {
                return Err(usage(format!(
                    "a cluster needs a token that its driver, scheduler and executors share; valid: {TOKEN_FILE} names a file with one, \
                     such as `openssl rand -hex 32` makes, or {TOKEN} is one"
                )));
            }
        };
        let text = text.trim();
        if text.len() < MIN_CHARS {
            let message =
                format!("{from}: the cluster's token has {} characters; valid: {MIN_CHARS} or more", text.len());
            return Err(usage(message));
        }
        Ok(Self::new(text))
    }

    /// Makes a token of this text, without a check of its length.
    pub fn new(text: &str) -> Self {
        let mut key = [0; BLOCK_BYTES];
        match text.len() > BLOCK_BYTES {
            true => key[..32].copy_from_slice(&Sha256::digest(text)),
            false => key[..text.len()].copy_from_slice(text.as_bytes()),
        }
        Self(key)
    }

    /// HMAC-SHA256 of the concatenated parts.
    pub fn seal(&self, parts: &[&[u8]]) -> Seal {
        let inner = parts.iter().fold(Sha256::new().chain_update(self.0.map(|b| b ^ 0x36)), |h, p| h.chain_update(p));
        Sha256::new().chain_update(self.0.map(|b| b ^ 0x5c)).chain_update(inner.finalize()).finalize().into()
    }

    /// Whether this token sealed these parts. Compares in constant time.
    pub fn verify(&self, parts: &[&[u8]], seal: &[u8]) -> bool {
        self.seal(parts).ct_eq(seal).into()
    }

    /// The proof of the token that each call to the scheduler carries.
    pub fn proof(&self) -> String {
        hex::encode(self.seal(&[b"stillhouse cluster call"]))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, test cases 2 and 6 (a key longer than a block).
    #[test]
    fn seals_are_those_of_the_rfc() {
        let jefe = Token::new("Jefe").seal(&[b"what do ya want ", b"for nothing?"]);
        assert_eq!(hex::encode(jefe), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        // 131 bytes of 0xaa are not valid text, so the test builds the key that `new` would make of them
        let mut key = [0; BLOCK_BYTES];
        key[..32].copy_from_slice(&Sha256::digest([0xaa; 131]));
        let long = Token(key).seal(&[b"Test Using Larger Than Block-Size Key - Hash Key First"]);
        assert_eq!(hex::encode(long), "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
        assert_eq!(Token::new(&"k".repeat(65)).0[32..], [0; 32]);
    }

    #[test]
    fn another_token_or_another_byte_is_seen() {
        let (token, other) = (Token::new(&"a".repeat(32)), Token::new(&"b".repeat(32)));
        let seal = token.seal(&[b"x"]);
        assert!(token.verify(&[b"x"], &seal));
        assert!(!other.verify(&[b"x"], &seal) && !token.verify(&[b"y"], &seal) && !token.verify(&[b"x"], &seal[1..]));
    }

    #[test]
    fn a_token_that_can_be_guessed_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, "secret\n").unwrap();
        let refused = Token::load(Some(&file)).unwrap_err().to_string();
        assert!(refused.contains("has 6 characters; valid: 32 or more"), "{refused}");
        std::fs::write(&file, format!("{}\n", "a1".repeat(16))).unwrap();
        assert_eq!(Token::load(Some(&file)).unwrap(), Token::new(&"a1".repeat(16)));
    }
}
