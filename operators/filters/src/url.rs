//! Blocklists of URLs, with the results of datatrove's `URLFilter`.

use std::collections::BTreeSet;
use std::ops::Range;

/// Lists of a [`UrlBlocklist`]: text files with an entry per line. Blank lines and those that begin with `#` are no entries.
#[derive(Debug, Clone, Copy, Default)]
pub struct UrlLists<'a> {
    /// Domains. They block their subdomains.
    pub domains: Option<&'a str>,
    /// URLs, as they are written.
    pub urls: Option<&'a str>,
    /// Words that no URL may have.
    pub banned_words: Option<&'a str>,
    /// Words of which a URL may have some.
    pub soft_banned_words: Option<&'a str>,
    /// Texts that no URL may contain, once all characters but letters and digits are removed.
    pub banned_subwords: Option<&'a str>,
}

/// Why a URL is blocked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockedUrl {
    /// Its domain, or one above it, is in the list of domains.
    Domain,
    /// It is in the list of URLs.
    Url,
    /// It has a banned word.
    BannedWord,
    /// It has too many different soft banned words.
    SoftBannedWords,
    /// It contains a banned subword.
    BannedSubword,
}

impl BlockedUrl {
    /// The name of the reason, for counts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Domain => "domain",
            Self::Url => "url",
            Self::BannedWord => "banned_word",
            Self::SoftBannedWords => "soft_banned_words",
            Self::BannedSubword => "banned_subword",
        }
    }
}

/// Decides which URLs are blocked.
///
/// Results are those of datatrove 0.10.1 with `use_integrated_lists=False`, with three differences. A domain blocks all its
/// subdomains, also where it is a subdomain itself or a public suffix; datatrove compares only the registered domain and the
/// whole host name. IP addresses can be in the list. Domains are compared without case. Words of a URL are compared as written, as datatrove does, and those of
/// lists in lower case.
///
/// Memory: the lists of domains and URLs, and 16 bytes for each entry. Cost of a URL: a binary search for each label of its
/// domain and one for itself, and its length times the number of subwords.
#[derive(Debug, Clone)]
pub struct UrlBlocklist {
    domains: SortedLines,
    urls: SortedLines,
    banned_words: BTreeSet<String>,
    soft_banned_words: BTreeSet<String>,
    banned_subwords: Vec<String>,
    soft_banned_threshold: usize,
}

impl UrlBlocklist {
    /// Sorts the lists. A URL is blocked if it has `soft_banned_threshold` different soft banned words or more.
    pub fn new(lists: UrlLists<'_>, soft_banned_threshold: usize) -> Self {
        let words = |list: Option<&str>| -> BTreeSet<String> {
            entries(list.unwrap_or_default()).map(letters_and_digits).filter(|word| !word.is_empty()).collect()
        };
        Self {
            domains: SortedLines::new(lists.domains.unwrap_or_default().to_ascii_lowercase()),
            urls: SortedLines::new(lists.urls.unwrap_or_default().to_owned()),
            banned_words: words(lists.banned_words),
            soft_banned_words: words(lists.soft_banned_words),
            banned_subwords: words(lists.banned_subwords).into_iter().collect(),
            soft_banned_threshold,
        }
    }

    /// Returns why a URL is blocked; `None` if it is not.
    pub fn judge(&self, url: &str) -> Option<BlockedUrl> {
        let host = host_name(url).to_ascii_lowercase();
        let parents = host.match_indices('.').map(|(at, _)| &host[at + 1..]);
        if std::iter::once(host.as_str()).chain(parents).any(|domain| self.domains.contains(domain)) {
            return Some(BlockedUrl::Domain);
        }
        if self.urls.contains(url) {
            return Some(BlockedUrl::Url);
        }
        let words: BTreeSet<&str> = url.split(|c: char| !c.is_ascii_alphanumeric()).collect();
        if words.iter().any(|word| self.banned_words.contains(*word)) {
            return Some(BlockedUrl::BannedWord);
        }
        let soft = words.iter().filter(|word| self.soft_banned_words.contains(**word)).count();
        if !self.soft_banned_words.is_empty() && soft >= self.soft_banned_threshold {
            return Some(BlockedUrl::SoftBannedWords);
        }
        let joined = letters_and_digits(url);
        let has_subword = self.banned_subwords.iter().any(|subword| joined.contains(subword.as_str()));
        has_subword.then_some(BlockedUrl::BannedSubword)
    }
}

/// Counts the entries of a list.
pub fn count_entries(list: &str) -> usize {
    entries(list).count()
}

fn entries(list: &str) -> impl Iterator<Item = &str> {
    list.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// Removes all characters but ASCII letters and digits, and makes letters lower case.
fn letters_and_digits(text: &str) -> String {
    text.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

/// The host name of a URL, with or without its scheme, user and port.
fn host_name(url: &str) -> &str {
    let after_scheme = match url.find("//") {
        Some(at) if is_scheme(&url[..at]) => &url[at + 2..],
        _ => url,
    };
    let authority = after_scheme.split(['/', '?', '#']).next().unwrap_or_default();
    let with_port = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let host = match with_port.strip_prefix('[') {
        Some(ipv6) => ipv6.split(']').next().unwrap_or_default(),
        None => with_port.split(':').next().unwrap_or_default(),
    };
    host.trim().trim_end_matches(['.', '\u{3002}', '\u{ff0e}', '\u{ff61}'])
}

/// Whether what is before `//` is a scheme with its colon, or nothing.
fn is_scheme(text: &str) -> bool {
    let Some(name) = text.strip_suffix(':') else { return text.is_empty() };
    name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.'))
}

/// The entries of a list, sorted for look-ups.
#[derive(Debug, Clone)]
struct SortedLines {
    text: String,
    entries: Vec<Range<usize>>,
}

impl SortedLines {
    fn new(text: String) -> Self {
        let start = text.as_ptr() as usize;
        let mut entries: Vec<Range<usize>> = entries(&text)
            .map(|entry| {
                let at = entry.as_ptr() as usize - start;
                at..at + entry.len()
            })
            .collect();
        entries.sort_unstable_by(|a, b| text[a.clone()].cmp(&text[b.clone()]));
        Self { text, entries }
    }

    fn contains(&self, wanted: &str) -> bool {
        self.entries.binary_search_by(|entry| self.text[entry.clone()].cmp(wanted)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;

    use super::*;

    /// What `tests/urls.py` writes.
    #[derive(Deserialize)]
    struct Golden {
        lists: BTreeMap<String, Vec<String>>,
        decisions: Vec<(String, String)>,
    }

    #[test]
    fn results_are_those_of_datatrove() {
        let golden: Golden = serde_json::from_str(include_str!("../tests/urls.json")).unwrap();
        let lists: BTreeMap<&str, String> =
            golden.lists.iter().map(|(name, entries)| (name.as_str(), entries.join("\n"))).collect();
        let list = |name: &str| lists.get(name).map(String::as_str);
        let lists = UrlLists {
            domains: list("domains"),
            urls: list("urls"),
            banned_words: list("banned_words"),
            soft_banned_words: list("soft_banned_words"),
            banned_subwords: list("banned_subwords"),
        };
        let blocklist = UrlBlocklist::new(lists, 2);
        let ours = |reason: &str| match reason {
            "subdomain" => "domain".to_owned(),
            "hard_blacklisted" => "banned_word".to_owned(),
            "soft_blacklisted" => "soft_banned_words".to_owned(),
            "blacklisted_subword" => "banned_subword".to_owned(),
            other => other.to_owned(),
        };
        for (url, reason) in &golden.decisions {
            assert_eq!(blocklist.judge(url).map_or("", BlockedUrl::name), ours(reason), "{url}");
        }
        assert!(golden.decisions.len() > 1000);
    }

    #[test]
    fn hosts_are_found_in_urls_of_every_form() {
        for (url, host) in [
            ("https://user:pass@www.Example.org:8080/a?b#c", "www.Example.org"),
            ("//example.org", "example.org"),
            ("example.org/a//b", "example.org"),
            ("http://example.org.?x", "example.org"),
            ("http://[::1]:80/", "::1"),
            ("mailto:a@example.org", "example.org"),
            ("", ""),
            ("http://", ""),
        ] {
            assert_eq!(host_name(url), host, "{url}");
        }
    }

    #[test]
    fn a_list_blocks_what_it_names() {
        let lists = UrlLists {
            domains: Some("# bad\n\nBad.example\nsub.good.example\r\n  192.0.2.1 \n"),
            urls: Some("https://good.example/page?A=1\n"),
            banned_words: Some("casino\nx-x-x\n"),
            soft_banned_words: Some("poker\nbet\nslots"),
            banned_subwords: Some("free money"),
        };
        let blocklist = UrlBlocklist::new(lists, 2);
        for (url, reason) in [
            ("http://bad.example", "domain"),
            ("http://a.b.BAD.example/x", "domain"),
            ("http://notbad.example", ""),
            ("http://good.example", ""),
            ("http://deep.sub.good.example", "domain"),
            ("http://192.0.2.1:80/", "domain"),
            ("https://good.example/page?A=1", "url"),
            ("https://good.example/page?a=1", ""),
            ("https://good.example/casino.html", "banned_word"),
            // words of a URL are compared as written
            ("https://good.example/Casino.html", ""),
            ("https://good.example/xxx", "banned_word"),
            ("https://good.example/poker-poker", ""),
            ("https://good.example/poker/bet", "soft_banned_words"),
            ("https://good.example/getFree-Money", "banned_subword"),
            ("", ""),
        ] {
            assert_eq!(blocklist.judge(url).map_or("", BlockedUrl::name), reason, "{url}");
        }
        // without lists nothing is blocked, whatever the threshold
        assert_eq!(UrlBlocklist::new(UrlLists::default(), 0).judge("http://bad.example"), None);
        assert_eq!(count_entries("# a\n\n b \nc"), 2);
    }
}
