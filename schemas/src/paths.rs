//! Syntax of paths in a job file: `~` at the beginning, `${VAR}`, and in inputs `{a,b}`.
//!
//! ```text
//!   ~/corpora/${LANG}-{2023,2024}/*.jsonl ─alternatives─► ~/corpora/${LANG}-2023/*.jsonl ─parts─► home, "/corpora/", LANG, "-2023/*.jsonl"
//! ```
//!
//! This module does not know the values of variables. `$${` is a literal `${`; a `$` without a brace is an ordinary
//! character. So is a brace without a comma inside or without its partner, and any brace inside `[..]`.

/// A part of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part<'a> {
    /// Literal characters and globs.
    Text(&'a str),
    /// `~` at the beginning: the user's home folder.
    Home,
    /// `${VAR}`.
    Variable(&'a str),
}

const VALID: &str = "valid: ${NAME}, with letters, digits and _; $${ for a ${ that is part of a name";

/// Splits a path into its parts.
///
/// # Errors
/// For a `${` that begins no variable, a variable whose name looks like a secret, and the home folder of another user.
pub fn parts(path: &str) -> Result<Vec<Part<'_>>, String> {
    let mut parts = Vec::new();
    let mut rest = path;
    if let Some(after) = path.strip_prefix('~') {
        if !after.is_empty() && !after.starts_with('/') {
            return Err(
                "begins with ~ and a name; valid: ~/ for your own home, ./~ for a name that begins with ~".into()
            );
        }
        parts.push(Part::Home);
        rest = after;
    }
    while let Some(at) = rest.find("${") {
        let is_escaped = rest[..at].ends_with('$');
        let before = &rest[..at - usize::from(is_escaped)];
        if !before.is_empty() {
            parts.push(Part::Text(before));
        }
        rest = &rest[at + 2..];
        if is_escaped {
            parts.push(Part::Text("${"));
            continue;
        }
        let (name, after) = rest.split_once('}').ok_or_else(|| format!("has a ${{ without its }}; {VALID}"))?;
        check_variable_name(name)?;
        parts.push(Part::Variable(name));
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(Part::Text(rest));
    }
    Ok(parts)
}

fn check_variable_name(name: &str) -> Result<(), String> {
    let is_name_char = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.is_empty() || !name.chars().all(is_name_char) || name.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(format!("has no name of a variable in ${{}}; {VALID}"));
    }
    // paths are sent to stores and hubs, and shown in messages
    let secret = ["SECRET", "TOKEN", "PASSWORD", "PASSWD", "CREDENTIAL", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY"];
    if secret.iter().any(|word| name.to_ascii_uppercase().contains(word)) {
        return Err(format!("names ${{{name}}}, which looks like a secret; no path holds one"));
    }
    Ok(())
}

/// Whether a path has the same meaning on every machine: it has neither `~` nor variables.
pub fn is_plain(path: &str) -> bool {
    parts(path).is_ok_and(|parts| parts.iter().all(|part| matches!(part, Part::Text(_))))
}

/// Maximum number of paths that one path may expand to, and maximum bytes of all of them.
const MAX_ALTERNATIVES: usize = 10_000;
const MAX_ALTERNATIVES_BYTES: usize = 10_000_000;
/// Maximum nesting depth of braces.
const MAX_BRACE_DEPTH: usize = 8;

/// Expands `{a,b}` to all alternatives, in the order in which they are written.
///
/// # Errors
/// If there are more than 10,000 alternatives, or if braces are nested more than 8 deep.
pub fn alternatives(path: &str) -> Result<Vec<String>, String> {
    let groups = if path.contains('{') { groups(path)? } else { Vec::new() };
    if groups.is_empty() {
        return Ok(vec![path.to_owned()]);
    }
    expand(path, 0, path.len(), &groups)
}

/// Returns the number of paths that a path expands to, without expanding it.
pub fn count(path: &str) -> usize {
    fn count_between(from: usize, to: usize, groups: &[BraceGroup]) -> usize {
        let mut product = 1_usize;
        let mut at = from;
        let first = groups.partition_point(|group| group.start < from);
        for group in groups[first..].iter().take_while(|group| group.start < to) {
            if group.start >= at {
                let options = group.options().map(|(from, to)| count_between(from, to, groups));
                product = product.saturating_mul(options.fold(0, usize::saturating_add));
                at = group.end + 1;
            }
        }
        product
    }
    if !path.contains('{') {
        return 1;
    }
    groups(path).map_or(1, |groups| count_between(0, path.len(), &groups))
}

/// A group `{a,b}`: offsets of its opening brace, its commas and its closing brace.
struct BraceGroup {
    start: usize,
    commas: Vec<usize>,
    end: usize,
}

impl BraceGroup {
    /// Start and end offsets of the alternatives.
    fn options(&self) -> impl Iterator<Item = (usize, usize)> {
        let starts = std::iter::once(self.start).chain(self.commas.iter().copied());
        let ends = self.commas.iter().copied().chain([self.end]);
        starts.map(|start| start + 1).zip(ends)
    }
}

/// The brace groups that are closed and contain commas, sorted by their start; outer groups come first.
fn groups(path: &str) -> Result<Vec<BraceGroup>, String> {
    let mut open: Vec<BraceGroup> = Vec::new();
    let mut found = Vec::new();
    // searched once: a repeated search for a missing bracket would scan the rest of the path each time
    let last = |c: char| path.rfind(c).unwrap_or(0);
    let (last_bracket, last_brace) = (last(']'), last('}'));
    let mut at = 0;
    while let Some(byte) = path.as_bytes().get(at) {
        let rest = &path[at..];
        at += match byte {
            b'$' if rest.starts_with("$${") => 3,
            b'$' if rest.starts_with("${") && at < last_brace => rest.find('}').map_or(2, |end| end + 1),
            b'[' if at < last_bracket => bracket_length(rest),
            b'{' => {
                open.push(BraceGroup { start: at, commas: Vec::new(), end: at });
                1
            }
            b',' => {
                open.last_mut().into_iter().for_each(|group| group.commas.push(at));
                1
            }
            b'}' => {
                found.extend(
                    open.pop().filter(|group| !group.commas.is_empty()).map(|group| BraceGroup { end: at, ..group }),
                );
                1
            }
            // the bytes of multi-byte characters match none of the above
            _ => rest.chars().next().map_or(1, char::len_utf8),
        };
    }
    found.sort_by_key(|group| group.start);
    let mut ends: Vec<usize> = Vec::new();
    for group in &found {
        ends.retain(|end| *end > group.start);
        ends.push(group.end);
        if ends.len() > MAX_BRACE_DEPTH {
            return Err(format!("has braces in braces more than {MAX_BRACE_DEPTH} deep"));
        }
    }
    Ok(found)
}

/// Length of a `[..]` in bytes, in which braces are literal; 1 for a bracket without its partner.
fn bracket_length(rest: &str) -> usize {
    let inside = if rest.starts_with("[!") { 2 } else { 1 };
    // a ] right after the opening belongs to the class
    let from = inside + usize::from(rest[inside..].starts_with(']'));
    rest[from..].find(']').map_or(1, |end| from + end + 1)
}

fn expand(path: &str, from: usize, to: usize, groups: &[BraceGroup]) -> Result<Vec<String>, String> {
    let mut expanded = vec![String::new()];
    let mut at = from;
    let first = groups.partition_point(|group| group.start < from);
    for group in groups[first..].iter().take_while(|group| group.start < to) {
        if group.start < at {
            // inside the previous group
            continue;
        }
        let mut options = Vec::new();
        for (from, to) in group.options() {
            options.extend(expand(path, from, to, groups)?);
        }
        expanded = joined(&expanded, &path[at..group.start], &options)?;
        at = group.end + 1;
    }
    joined(&expanded, &path[at..to], &[String::new()])
}

fn joined(heads: &[String], between: &str, tails: &[String]) -> Result<Vec<String>, String> {
    let count = heads.len().saturating_mul(tails.len());
    let length = |texts: &[String]| texts.iter().map(String::len).sum::<usize>();
    let bytes = length(heads).saturating_mul(tails.len())
        + length(tails).saturating_mul(heads.len())
        + between.len().saturating_mul(count);
    if count > MAX_ALTERNATIVES || bytes > MAX_ALTERNATIVES_BYTES {
        return Err(format!("its braces expand to more than {MAX_ALTERNATIVES} paths; name a folder or use *"));
    }
    Ok(heads.iter().flat_map(|head| tails.iter().map(move |tail| [head, between, tail].concat())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_taken_apart() {
        use Part::{Home, Text, Variable};
        for (path, expected) in [
            ("a/b", vec![Text("a/b")]),
            ("~", vec![Home]),
            ("~/a", vec![Home, Text("/a")]),
            ("a~/~", vec![Text("a~/~")]),
            ("${A}/x${B_2}", vec![Variable("A"), Text("/x"), Variable("B_2")]),
            ("s3://${BUCKET}/k", vec![Text("s3://"), Variable("BUCKET"), Text("/k")]),
            ("a$b$", vec![Text("a$b$")]),
            ("$${A}", vec![Text("${"), Text("A}")]),
            ("x$${A}${B}", vec![Text("x"), Text("${"), Text("A}"), Variable("B")]),
            ("", vec![]),
        ] {
            assert_eq!(parts(path), Ok(expected), "{path}");
        }
        for (path, says) in [
            ("${", "without its }"),
            ("${A", "without its }"),
            ("a/${}", "no name of a variable"),
            ("${1A}", "no name of a variable"),
            ("${A:-x}", "no name of a variable"),
            ("${AWS_SECRET_ACCESS_KEY}", "looks like a secret"),
            ("${hf_token}", "looks like a secret"),
            ("~bob/x", "valid: ~/"),
        ] {
            assert!(parts(path).unwrap_err().contains(says), "{path}");
        }
        assert!(is_plain("a$b") && is_plain("$${A}") && !is_plain("~/x") && !is_plain("${A}"));
    }

    #[test]
    fn braces_stand_for_each_alternative_in_their_order() {
        for (path, expected) in [
            ("a", "a"),
            ("{b,a}.txt", "b.txt a.txt"),
            ("x{1,2}{a,b}", "x1a x1b x2a x2b"),
            ("x{,.gz}", "x x.gz"),
            ("{a,{b,c}d}e", "ae bde cde"),
            ("{a,b}/{c,d,}", "a/c a/d a/ b/c b/d b/"),
            ("é{ü,ñ}", "éü éñ"),
            ("s3://{a,b}/k", "s3://a/k s3://b/k"),
            ("{s3://a,/b}/*.gz", "s3://a/*.gz /b/*.gz"),
            // not expanded
            ("{a}", "{a}"),
            ("{a,b", "{a,b"),
            ("a,b}", "a,b}"),
            ("{}", "{}"),
            ("[{]a,b}", "[{]a,b}"),
            ("[]{]a,b}", "[]{]a,b}"),
            ("[!]{]a,b}", "[!]{]a,b}"),
            ("[{a,b}", "[a [b"),
            ("{a{b,c}}", "{ab} {ac}"),
            ("{${A},${B}}/x", "${A}/x ${B}/x"),
            ("${A,B}{c,d}", "${A,B}c ${A,B}d"),
            ("$${a,b}", "$${a,b}"),
        ] {
            assert_eq!(alternatives(path).unwrap().join(" "), expected, "{path}");
            assert_eq!(count(path), alternatives(path).unwrap().len(), "{path}");
        }
    }

    #[test]
    fn hostile_braces_are_refused() {
        for path in [
            "{a,b}".repeat(40),
            "{a,b}".repeat(20_000),
            format!("{}{}", "{a,".repeat(50_000), "}".repeat(50_000)),
            format!("{}{}", "{a,".repeat(9), "}".repeat(9)),
            format!("{{{}}}", "a,".repeat(10_000)),
            format!("{}{}", "x".repeat(100_000), "{a,b,c,d,e,f}".repeat(5)),
        ] {
            assert!(alternatives(&path).is_err(), "{:.30}", path);
        }
        for path in [
            "{".repeat(100_000),
            "{,".repeat(100_000),
            "[".repeat(100_000),
            "${".repeat(100_000),
            "}".repeat(100_000),
            format!("{}]", "[".repeat(100_000)),
        ] {
            assert_eq!(alternatives(&path).unwrap().len(), 1, "{:.30}", path);
        }
    }

    proptest::proptest! {
        /// Any path is split or refused; the parts, joined again, give the path.
        #[test]
        fn no_path_breaks_this(path in "(\\PC|[{},\\[\\]!$~/a]|\\$\\{A\\}){0,40}") {
            if let Ok(all) = alternatives(&path) {
                proptest::prop_assert_eq!(all.len(), count(&path));
                if !path.contains([',']) {
                    proptest::prop_assert_eq!(&all, std::slice::from_ref(&path));
                }
            }
            if let Ok(parts) = parts(&path) {
                let whole: String = parts.iter().map(|part| match part {
                    Part::Text("${") => "$${".to_owned(),
                    Part::Text(text) => (*text).to_owned(),
                    Part::Home => "~".to_owned(),
                    Part::Variable(name) => format!("${{{name}}}"),
                }).collect();
                proptest::prop_assert_eq!(whole, path);
            }
        }
    }
}
