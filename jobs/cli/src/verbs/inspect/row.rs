//! Renders one row: its text with groups and documents, and some of its tokens.

use std::collections::BTreeSet;

use stillhouse_datasets::inspect::{DocumentView, RowView, TokenView};
use stillhouse_pipeline::units;
use stillhouse_schemas::ids::DocumentId;
use unicode_width::UnicodeWidthChar;

use super::picture;
use crate::page::{Line, Page, Tone, View, escaped, quoted};
use crate::table::Table;

/// Maximum number of tokens in the text; `--json` has all.
const TEXT_TOKENS: usize = 4096;
/// Maximum number of documents to list.
const DOCUMENTS: usize = 12;
/// Number of tokens from the start to list.
const FIRST_TOKENS: usize = 8;

pub(super) fn render(row: &RowView, view_number: usize, view: View, page: &mut Page) {
    page.heading(&format!("Row {} of {}", units::count(row.row), row.shard));
    let padding = row.tokens.iter().filter(|t| !t.valid).count();
    let mut facts = format!("sequence_id {}, {}", row.sequence_id, units::counted(row.tokens.len() as u64, "token"));
    if padding > 0 {
        facts += &format!(", {} of them padding", units::count(padding as u64));
    }
    page.line(Line::plain("  ").with(Tone::Dim, facts));
    documents(&row.documents, page);
    page.blank();
    if has_groups(row) {
        page.line(legend(row, view_number, view));
    }
    match row.picture {
        Some(shape) => picture::render(row, shape, view, page),
        None => text(&row.tokens, row.numbers, view, page),
    }
    operator_facts(row, page);
    tokens(row, view, page);
}

/// Renders what operators show of the row, one fact per line.
fn operator_facts(row: &RowView, page: &mut Page) {
    for (name, value) in row.operators.iter().flat_map(|operator| &operator.facts) {
        // the lines of a picture have no name
        let name = if name.is_empty() { "  ".to_owned() } else { format!("{name}: ") };
        page.line(Line::plain("  ").with(Tone::Dim, name).with(Tone::Plain, value));
    }
}

fn documents(documents: &[DocumentView], page: &mut Page) {
    let mut table = Table::new("rrl").header(&["from", "document", "record"]);
    for document in documents.iter().take(DOCUMENTS) {
        let (split, ordinal) = DocumentId(document.document_id).parts();
        table.texts([
            units::count(document.offset as u64),
            document.document_id.to_string(),
            format!("{ordinal} of split {}, {}", split.0, document.file),
        ]);
    }
    if let Some(more) = documents.len().checked_sub(DOCUMENTS).filter(|n| *n > 0) {
        table.texts(["…".into(), String::new(), format!("{} more", units::count(more as u64))]);
    }
    page.facts(table);
}

fn has_groups(row: &RowView) -> bool {
    row.tokens.iter().any(|token| token.group.is_some())
}

fn legend(row: &RowView, view_number: usize, view: View) -> Line {
    let ones = row.tokens.iter().filter(|t| t.group == Some(true)).count();
    let zeros = row.tokens.iter().filter(|t| t.group == Some(false)).count();
    let (zero, one) = if view.colour { ("group 0", "group 1") } else { ("group 0", "‹group 1›") };
    Line::plain("  ")
        .with(
            Tone::Dim,
            row.partition_t.map_or(format!("view {view_number}: "), |t| format!("view {view_number}, t = {t:.4}: ")),
        )
        .with(Tone::GroupZero, zero)
        .with(Tone::Dim, format!(" {}, ", units::counted(zeros as u64, "token")))
        .with(Tone::GroupOne, one)
        .with(Tone::Dim, format!(" {}", units::counted(ones as u64, "token")))
}

fn text(tokens: &[TokenView], numbers: bool, view: View, page: &mut Page) {
    let mut wrap = Wrap::new(view.width.saturating_sub(4).max(8));
    let mut group = None;
    let mark = |wrap: &mut Wrap, from: Option<bool>, to: Option<bool>| {
        if !view.colour && from != to {
            if from == Some(true) {
                wrap.push(Tone::GroupOne, "›");
            }
            if to == Some(true) {
                wrap.push(Tone::GroupOne, "‹");
            }
        }
    };
    let valid = || tokens.iter().filter(|t| t.valid);
    for token in valid().take(TEXT_TOKENS) {
        mark(&mut wrap, group, token.group);
        group = token.group;
        let tone = match token.group {
            None => Tone::Plain,
            Some(false) => Tone::GroupZero,
            Some(true) => Tone::GroupOne,
        };
        wrap.push(tone, &token.text.replace('\n', "↵"));
        if numbers {
            wrap.push(Tone::Plain, " ");
        }
    }
    mark(&mut wrap, group, None);
    let more = valid().count().saturating_sub(TEXT_TOKENS);
    if more > 0 {
        wrap.push(Tone::Dim, &format!(" … and {} more tokens", units::count(more as u64)));
    }
    for line in wrap.finish() {
        let mut indented = Line::plain("  │ ");
        indented.append(line);
        page.line(indented);
    }
}

/// Breaks text into lines of `cells` cells, after a space if there is one near the end.
struct Wrap {
    cells: usize,
    line: Vec<(Tone, char)>,
    used: usize,
    lines: Vec<Line>,
}

impl Wrap {
    fn new(cells: usize) -> Self {
        Self { cells, line: Vec::new(), used: 0, lines: Vec::new() }
    }

    fn push(&mut self, tone: Tone, text: &str) {
        for c in escaped(text).chars() {
            let width = c.width().unwrap_or(0);
            if self.used + width > self.cells {
                self.end_line();
            }
            self.used += width;
            self.line.push((tone, c));
        }
    }

    fn end_line(&mut self) {
        let half = self.line.len() / 2;
        let space = self.line.iter().rposition(|(_, c)| *c == ' ').filter(|at| *at >= half);
        let rest = self.line.split_off(space.map_or(self.line.len(), |at| at + 1));
        self.used = rest.iter().map(|(_, c)| c.width().unwrap_or(0)).sum();
        let full = std::mem::replace(&mut self.line, rest);
        self.lines.push(joined(&full));
    }

    fn finish(mut self) -> Vec<Line> {
        if !self.line.is_empty() {
            self.lines.push(joined(&self.line));
        }
        self.lines
    }
}

fn joined(characters: &[(Tone, char)]) -> Line {
    let mut line = Line::new();
    for (tone, c) in characters {
        line.push(*tone, c.encode_utf8(&mut [0; 4]));
    }
    line
}

/// Lists the first tokens, and those whose blueprint is shown.
fn tokens(row: &RowView, view: View, page: &mut Page) {
    let mut chosen: BTreeSet<usize> = (0..row.tokens.len().min(FIRST_TOKENS)).collect();
    chosen.extend(row.blueprints.iter().map(|b| b.position));
    let has_group = has_groups(row);
    let has_teacher = row.tokens.iter().any(|t| t.logprob.is_some());
    let has_noise = row.tokens.iter().any(|t| t.corrections.is_some());
    let base = row.subtoken_base.map(|b| format!("base {b}"));

    let optional = [(has_group, "group", 'r'), (has_teacher, "ln p", 'r'), (has_noise, "corrections", 'r')];
    let mut columns = String::from("rrl");
    let mut names = vec!["position", "id", "text"];
    for (_, name, align) in optional.into_iter().filter(|(has, _, _)| *has) {
        columns.push(align);
        names.push(name);
    }
    if let Some(base) = &base {
        columns.push('l');
        names.push(base);
    }
    let of_operators: Vec<_> = row.operators.iter().filter(|operator| !operator.tokens.is_empty()).collect();
    for operator in &of_operators {
        columns.push('l');
        names.push(&operator.operator);
    }
    let mut table = Table::new(&columns).header(&names);
    let mut next = 0;
    for position in chosen {
        let Some(token) = row.tokens.get(position) else {
            continue;
        };
        if position > next {
            table.texts(["…"]);
        }
        next = position + 1;
        let mut cells = vec![units::count(position as u64), token.id.to_string(), shown_text(token)];
        if has_group {
            cells.push(token.group.map_or(String::new(), |g| u8::from(g).to_string()));
        }
        if has_teacher {
            cells.push(token.logprob.map_or(String::new(), |l| format!("{l:.3}")));
        }
        if has_noise {
            cells.push(token.corrections.map_or(String::new(), |n| n.to_string()));
        }
        if base.is_some() {
            let digits: Vec<String> = token.subtokens.iter().map(u32::to_string).collect();
            cells.push(digits.join(" "));
        }
        cells.extend(of_operators.iter().map(|operator| operator.tokens.get(position).cloned().unwrap_or_default()));
        table.texts(cells);
    }
    page.heading("Tokens");
    page.table(table, view);
}

fn shown_text(token: &TokenView) -> String {
    if token.valid { quoted(&token.text) } else { format!("{} (padding)", quoted(&token.text)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrapped(cells: usize, text: &str) -> Vec<String> {
        let mut wrap = Wrap::new(cells);
        wrap.push(Tone::Plain, text);
        let mut page = Page::new();
        wrap.finish().into_iter().for_each(|line| page.line(line));
        page.render(false).lines().map(str::to_owned).collect()
    }

    #[test]
    fn lines_break_after_spaces_and_long_words_anywhere() {
        assert_eq!(wrapped(10, "one two three four"), ["one two", "three four"]);
        assert_eq!(wrapped(5, "abcdefghijk l"), ["abcde", "fghij", "k l"]);
        assert_eq!(wrapped(5, "漢字漢字"), ["漢字", "漢字"]);
        assert_eq!(wrapped(8, "\x1b\x1b\x1b"), ["\\u{1b}\\u", "{1b}\\u{1", "b}"]);
        assert!(wrapped(5, "").is_empty());
    }
}
