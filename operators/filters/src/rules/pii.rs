use std::net::Ipv4Addr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::RuleError;
use crate::document::Document;
use crate::unicode::{ALPHABETIC, NUMERIC, classes};

/// Replaces e-mail addresses and IPv4 addresses, as datatrove's `PIIFormatter`. It drops no document.
///
/// The replacements are used in turn. Each document starts with the first one; datatrove goes on where the document
/// before ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Pii {
    /// Whether to replace e-mail addresses.
    pub replace_emails: bool,
    /// Whether to replace IPv4 addresses.
    pub replace_ips: bool,
    /// Whether to leave addresses of private and reserved networks.
    pub only_public_ips: bool,
    /// Replacements of e-mail addresses.
    #[schemars(length(min = 1))]
    pub email_replacements: Vec<String>,
    /// Replacements of IPv4 addresses.
    #[schemars(length(min = 1))]
    pub ip_replacements: Vec<String>,
}

impl Default for Pii {
    fn default() -> Self {
        let emails = ["email@example.com", "firstname.lastname@example.org"];
        // the list of datatrove 0.10.1: addresses that did not answer when it was made
        let ips =
            ["22.214.171.124", "126.96.36.199", "188.8.131.52", "184.108.40.206", "220.127.116.11", "18.104.22.168"];
        Self {
            replace_emails: true,
            replace_ips: true,
            only_public_ips: true,
            email_replacements: emails.map(str::to_owned).to_vec(),
            ip_replacements: ips.map(str::to_owned).to_vec(),
        }
    }
}

impl Pii {
    pub(crate) fn check(&self) -> Result<(), RuleError> {
        let lists = [
            ("pii.email_replacements", self.replace_emails, &self.email_replacements),
            ("pii.ip_replacements", self.replace_ips, &self.ip_replacements),
        ];
        match lists.into_iter().find(|(_, is_on, list)| *is_on && list.is_empty()) {
            Some((field, ..)) => Err(RuleError::new(field, "[]", "at least one replacement")),
            None => Ok(()),
        }
    }

    pub(crate) fn apply(&self, document: &mut Document) {
        if self.replace_emails && memchr::memchr(b'@', document.text().as_bytes()).is_some() {
            let replaced = replace(document.text(), &self.email_replacements, next_email);
            replaced.into_iter().for_each(|text| document.replace(text));
        }
        if self.replace_ips {
            let next = |text: &str, from| next_address(text, from, self.only_public_ips);
            let replaced = replace(document.text(), &self.ip_replacements, next);
            replaced.into_iter().for_each(|text| document.replace(text));
        }
    }
}

/// Replaces the ranges that `next` finds from a position on, by the replacements in turn. `None` if there are none.
fn replace(
    text: &str,
    replacements: &[String],
    next: impl Fn(&str, usize) -> Option<(usize, usize)>,
) -> Option<String> {
    let (mut replaced, mut copied) = (String::new(), 0);
    let mut replacements = replacements.iter().cycle();
    while let Some((start, end)) = next(text, copied) {
        replaced.push_str(text.get(copied..start)?);
        replaced.push_str(replacements.next()?);
        copied = end;
    }
    if copied == 0 {
        return None;
    }
    replaced.push_str(text.get(copied..)?);
    Some(replaced)
}

/// Returns the next e-mail address that starts at or after `from`.
///
/// Its local part ends at an `@` and lies within a run of the characters of atoms and full stops, so each `@` is tried
/// once, and all tries together are linear.
fn next_email(text: &str, from: usize) -> Option<(usize, usize)> {
    let bytes = text.as_bytes();
    let mut last_at = from;
    for at in memchr::memchr_iter(b'@', bytes.get(from..)?).map(|at| from + at) {
        let least = last_at;
        last_at = at + 1;
        let Some(domain_end) = domain_end(bytes, at + 1) else { continue };
        if let Some(start) = local_part_start(text, least, at) {
            return Some((start, domain_end));
        }
    }
    None
}

/// Returns the first position from `least` at which a local part starts that ends at `at`: a word boundary, after which
/// atoms are separated by single full stops.
fn local_part_start(text: &str, least: usize, at: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut first = at;
    let mut after = b'.';
    while first > least
        && let Some(&byte) = bytes.get(first - 1)
        && (is_atom(byte) || byte == b'.' && after != b'.')
    {
        after = byte;
        first -= 1;
    }
    let is_word = |c: char| c == '_' || classes().is(c, ALPHABETIC | NUMERIC);
    let mut before = text.get(..first)?.chars().next_back().is_some_and(is_word);
    for (start, c) in text.get(first..at)?.char_indices() {
        let word = is_word(c);
        if c != '.' && word != before {
            return Some(first + start);
        }
        before = word;
    }
    None
}

/// ``[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]``.
fn is_atom(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+/=?^_`{|}~-".contains(&byte)
}

/// Returns the end of the domain that starts at `start`: a host name with a full stop, or an address in brackets.
fn domain_end(bytes: &[u8], start: usize) -> Option<usize> {
    if bytes.get(start) == Some(&b'[') {
        return literal_end(bytes, start + 1);
    }
    // the end of the labels, each with its full stop, and the end of the last label without it
    let (mut at, mut last_label_end, mut labels) = (start, start, 0);
    loop {
        let label = bytes.get(at..)?;
        let length = label.iter().take_while(|&&byte| byte.is_ascii_alphanumeric() || byte == b'-').count();
        let run = label.get(..length)?;
        let starts = run.first().is_some_and(u8::is_ascii_alphanumeric);
        let ends = run.last().is_some_and(u8::is_ascii_alphanumeric);
        if starts && ends && label.get(length) == Some(&b'.') {
            last_label_end = at + length;
            at += length + 1;
            labels += 1;
            continue;
        }
        if starts && labels > 0 {
            let letters = run.iter().rposition(u8::is_ascii_alphanumeric)?;
            return Some(at + letters + 1);
        }
        return (labels > 1).then_some(last_label_end);
    }
}

/// The rest of `[1.2.3.4]` or `[1.2.3.tag:]` after the bracket.
fn literal_end(bytes: &[u8], start: usize) -> Option<usize> {
    let mut at = start;
    for _ in 0..3 {
        at = whole_octet(bytes, at).filter(|&end| bytes.get(end) == Some(&b'.'))? + 1;
    }
    if let Some(end) = whole_octet(bytes, at)
        && bytes.get(end) == Some(&b']')
    {
        return Some(end + 1);
    }
    let tag = bytes.get(at..)?.iter().take_while(|&&byte| byte.is_ascii_alphanumeric() || byte == b'-').count();
    let end = at + tag;
    let ends = tag > 0 && bytes.get(end - 1).is_some_and(u8::is_ascii_alphanumeric);
    (ends && bytes.get(end..end + 2) == Some(b":]")).then_some(end + 2)
}

/// Returns the end of a run of 1 to 3 digits that is an octet.
fn whole_octet(bytes: &[u8], start: usize) -> Option<usize> {
    let end = octet_end(bytes, start)?;
    (!bytes.get(end).is_some_and(u8::is_ascii_digit)).then_some(end)
}

/// Returns the end of the octet that the pattern takes first: `25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?`.
fn octet_end(bytes: &[u8], start: usize) -> Option<usize> {
    let digit = |offset| bytes.get(start + offset).copied().filter(u8::is_ascii_digit);
    let length = match (digit(0)?, digit(1), digit(2)) {
        (b'2', Some(b'5'), Some(b'0'..=b'5'))
        | (b'2', Some(b'0'..=b'4'), Some(_))
        | (b'0' | b'1', Some(_), Some(_)) => 3,
        (_, Some(_), _) => 2,
        _ => 1,
    };
    Some(start + length)
}

/// Returns the next IPv4 address that starts at or after `from` and is to be replaced.
fn next_address(text: &str, from: usize, only_public: bool) -> Option<(usize, usize)> {
    let bytes = text.as_bytes();
    let mut least = from;
    for dot in memchr::memchr_iter(b'.', bytes.get(from..)?).map(|dot| from + dot) {
        let is_start = |&start: &usize| start >= least && whole_octet(bytes, start) == Some(dot);
        let Some(start) = (dot.saturating_sub(3)..dot).find(is_start) else { continue };
        let second = whole_octet(bytes, dot + 1).filter(|&end| bytes.get(end) == Some(&b'.'));
        let third = second.and_then(|end| whole_octet(bytes, end + 1)).filter(|&end| bytes.get(end) == Some(&b'.'));
        let Some(end) = third.and_then(|end| octet_end(bytes, end + 1)) else { continue };
        // an octet with a leading zero is no address for Python nor for Rust
        match text.get(start..end).and_then(|address| address.parse().ok()) {
            Some(address) if !only_public || is_global(address) => return Some((start, end)),
            _ => least = end,
        }
    }
    None
}

/// `ipaddress.IPv4Address.is_global` of CPython 3.11.7. Later versions also call 192.0.0.8 and more of 192.0.0.0/24 not
/// global.
fn is_global(address: Ipv4Addr) -> bool {
    !matches!(
        address.octets(),
        [0 | 10 | 127 | 240..=255, ..]
            | [100, 64..=127, ..]
            | [169, 254, ..]
            | [172, 16..=31, ..]
            | [192, 0, 0, 0..=7 | 170..=171]
            | [192, 0, 2, _]
            | [192, 168, ..]
            | [198, 18..=19, ..]
            | [198, 51, 100, _]
            | [203, 0, 113, _]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(rule: &Pii, text: &str) -> String {
        let mut document = Document::new(text);
        rule.apply(&mut document);
        document.into_text().into_owned()
    }

    #[test]
    fn replacements_are_used_in_turn() {
        let text = "a@b.co, x.y@z.org. and c-d@e.f.gh; 8.8.8.8 1.1.1.1";
        let replaced = "email@example.com, firstname.lastname@example.org. and email@example.com; \
            22.214.171.124 126.96.36.199";
        assert_eq!(apply(&Pii::default(), text), replaced);
    }

    #[test]
    fn only_public_addresses_are_replaced() {
        assert_eq!(apply(&Pii::default(), "10.1.2.3 01.2.3.4 192.168.0.1"), "10.1.2.3 01.2.3.4 192.168.0.1");
        let all = Pii { only_public_ips: false, ip_replacements: vec!["X".into()], ..Pii::default() };
        assert_eq!(apply(&all, "10.1.2.3 256.1.1.1 1.2.3.256"), "X 2X X6");
    }

    #[test]
    fn each_kind_can_be_switched_off() {
        let text = "a@b.co 8.8.8.8";
        assert_eq!(apply(&Pii { replace_ips: false, ..Pii::default() }, text), "email@example.com 8.8.8.8");
        assert_eq!(apply(&Pii { replace_emails: false, ..Pii::default() }, text), "a@b.co 22.214.171.124");
    }

    #[test]
    fn domains_end_where_the_pattern_ends() {
        let end = |domain: &str| domain_end(domain.as_bytes(), 0);
        assert_eq!(
            ["a.b", "a.b.", "a.b-", "a", "a.", "a.b.-", "-a.b", "a-.b"].map(end),
            [Some(3), Some(3), Some(3), None, None, Some(3), None, None]
        );
        assert_eq!(["[1.2.3.4]", "[1.2.3.a-b:]", "[1.2.3.4", "[1.2.3.256]"].map(end), [Some(9), Some(12), None, None]);
    }
}
