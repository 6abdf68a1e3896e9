//! spaCy's pattern for a word that is a URL, an e-mail address or a host name.

use crate::unicode::{ALPHABETIC, DECIMAL, LOWER, NUMERIC, classes};

/// Returns whether spaCy's `URL_MATCH` accepts a word without white space.
///
/// The pattern is `(scheme://)?(user@)?(address|host)(:port)?([/?#]any)?`. An authority can start at the word's start,
/// after the scheme or after any `@` but the first character. None of its characters is `@`, so all attempts together
/// are linear.
pub(super) fn is_url(word: &str) -> bool {
    if memchr::memchr(b'.', word.as_bytes()).is_none() {
        return false;
    }
    is_authority(word)
        || after_scheme(word).is_some_and(is_authority)
        || memchr::memchr_iter(b'@', word.as_bytes())
            .filter(|&at| at > 0)
            .any(|at| word.get(at + 1..).is_some_and(is_authority))
}

/// Returns what follows `[\w+.-]{2,}://`.
fn after_scheme(word: &str) -> Option<&str> {
    let (scheme, rest) = word.split_once("://")?;
    let is_part = |c| matches!(c, '_' | '+' | '-' | '.') || classes().is(c, ALPHABETIC | NUMERIC);
    (scheme.chars().nth(1).is_some() && scheme.chars().all(is_part)).then_some(rest)
}

/// Returns whether all of `rest` is an address or host name with an optional port and path.
fn is_authority(rest: &str) -> bool {
    let in_host = |c: char| c == '.' || is_label_inner(c) || classes().is(c, LOWER);
    let end = rest.find(|c| !in_host(c)).unwrap_or(rest.len());
    let (Some(host), Some(tail)) = (rest.get(..end), rest.get(end..)) else { return false };
    ends_authority(tail) && (is_host_name(host) || is_address(host))
}

/// `(:\d{2,5})?([/?#]\S*)?$`.
fn ends_authority(tail: &str) -> bool {
    let after_port = match tail.strip_prefix(':') {
        None => tail,
        Some(port) => {
            let after = port.trim_start_matches(|c| classes().is(c, DECIMAL));
            let digits = port.chars().take(6).take_while(|&c| classes().is(c, DECIMAL)).count();
            if !(2..=5).contains(&digits) {
                return false;
            }
            after
        }
    };
    after_port.is_empty() || after_port.starts_with(['/', '?', '#'])
}

/// `[A-Za-z0-9\u00a1-\uffff]`.
fn is_label_edge(c: char) -> bool {
    c.is_ascii_alphanumeric() || ('\u{a1}'..='\u{ffff}').contains(&c)
}

fn is_label_inner(c: char) -> bool {
    is_label_edge(c) || matches!(c, '_' | '-')
}

/// Labels of 1 to 64 characters, then a top-level domain of 2 to 63 lower-case letters.
fn is_host_name(host: &str) -> bool {
    let Some((labels, top)) = host.rsplit_once('.') else { return false };
    let top_length = top.chars().take(64).count();
    (2..=63).contains(&top_length) && top.chars().all(|c| classes().is(c, LOWER)) && labels.split('.').all(is_label)
}

fn is_label(label: &str) -> bool {
    label.starts_with(is_label_edge)
        && label.ends_with(is_label_edge)
        && label.chars().take(65).count() <= 64
        && label.chars().all(is_label_inner)
}

/// An IPv4 address outside the private and local networks. `\d` of the pattern is any decimal digit of Unicode.
fn is_address(host: &str) -> bool {
    let parts: Vec<&str> = host.split('.').take(5).collect();
    let [first, second, third, fourth] = parts.as_slice() else { return false };
    let middle = |part| octet(part, digit, ('5', '5'));
    let is_private = matches!((*first, *second), ("10" | "127", _) | ("169", "254") | ("192", "168"))
        || *first == "172" && is_private_172(second);
    !is_private
        && octet(first, |c| ('1'..='9').contains(&c), ('2', '3'))
        && middle(second)
        && middle(third)
        && octet(fourth, |c| ('1'..='9').contains(&c), ('5', '4'))
}

fn digit(c: char) -> bool {
    classes().is(c, DECIMAL)
}

/// `1[6-9]|2\d|3[0-1]`.
fn is_private_172(second: &str) -> bool {
    let mut characters = second.chars();
    match (characters.next(), characters.next(), characters.next()) {
        (Some('1'), Some('6'..='9'), None) | (Some('3'), Some('0' | '1'), None) => true,
        (Some('2'), Some(c), None) => digit(c),
        _ => false,
    }
}

/// One or two digits, the first of them checked, or three digits of a number from 100 to 2xy, where `(x, y)` are the last
/// two digits of the largest.
fn octet(part: &str, first_is_valid: impl Fn(char) -> bool, (tens, units): (char, char)) -> bool {
    let mut characters = part.chars();
    match (characters.next(), characters.next(), characters.next(), characters.next()) {
        (Some(a), b, None, _) => first_is_valid(a) && b.is_none_or(digit),
        (Some('1'), Some(b), Some(c), None) => digit(b) && digit(c),
        (Some('2'), Some(b), Some(c), None) if b == tens => ('0'..=units).contains(&c),
        (Some('2'), Some(b), Some(c), None) => ('0'..tens).contains(&b) && digit(c),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_what_spacy_accepts() {
        for word in [
            "example.com",
            "http://foo.com/blah_(wikipedia)#cite-1",
            "mailto:foo.bar@baz.com",
            "a@b@c.de",
            "✪df.ws",
            "userid:password@example.com:8080",
            "http://223.255.255.254",
            "1.2.3.4:80/x",
            "foo.com?q",
            "http://@a.bc",
        ] {
            assert!(is_url(word), "{word}");
        }
    }

    #[test]
    fn rejects_what_spacy_rejects() {
        for word in [
            "example",
            "http://",
            "lower.Upper",
            "@a.bc",
            "10.1.1.1",
            "192.168.1.1",
            "172.16.0.1",
            "224.1.1.1",
            "-a.com",
            "a-.com",
            "a..com",
            "a.c",
            "foo.com:1",
            "foo.com:123456",
            "1.2.3.0",
            "1.2.3.4.5",
            "a.com:x",
        ] {
            assert!(!is_url(word), "{word}");
        }
    }
}
