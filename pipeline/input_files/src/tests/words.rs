//! Text that compresses about as well as real text, the same at every call.

use serde_json::json;

/// Words that compress about as well as text.
pub(crate) fn words(bytes: usize) -> String {
    let mut state = 7_u64;
    let mut text = String::with_capacity(bytes + 10);
    while text.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push_str(
            ["the ", "of ", "light ", "river ", "seven ", "quick ", "mountain ", "é"][(state >> 61) as usize],
        );
        text.push_str(&(state >> 50).to_string());
    }
    text
}

/// JSON lines of about 2 KB each.
pub(crate) fn lines(bytes: usize) -> Vec<u8> {
    let text = words(bytes);
    let mut rest = text.as_str();
    let mut out = String::new();
    while !rest.is_empty() {
        let mut cut = rest.len().min(2000);
        while !rest.is_char_boundary(cut) {
            cut += 1;
        }
        out.push_str(&(json!({"id": out.len(), "text": &rest[..cut]}).to_string() + "\n"));
        rest = &rest[cut..];
    }
    out.into_bytes()
}
