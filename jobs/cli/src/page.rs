//! Styled text for a terminal. Text from a corpus or a file name can never control the terminal.
//!
//! ```text
//!   Page = lines;  Line = spans;  Span = (tone, text)
//!                                          └─ control and format characters are escaped when a span is created
//! ```
//!
//! Colours exist only as [`Tone`]s until the printer writes them. So an escape sequence in a document always prints as
//! `\u{1b}`. Widths are in terminal cells.

pub use crate::line::{Line, Tone, escaped, quoted};
use crate::table::Table;

/// Lines of text, one below the other.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Page(Vec<Line>);

impl Page {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a line.
    pub fn line(&mut self, line: Line) {
        self.0.push(line);
    }

    /// Adds an empty line.
    pub fn blank(&mut self) {
        self.0.push(Line::new());
    }

    /// Adds an empty line and a heading.
    pub fn heading(&mut self, text: &str) {
        self.blank();
        self.line(Line::new().with(Tone::Strong, text));
    }

    /// Adds a table. On a terminal, cuts it to the view's width.
    pub fn table(&mut self, table: Table, view: View) {
        let cells = if view.terminal { view.width } else { usize::MAX };
        self.0.extend(table.lines(cells));
    }

    /// Adds a table of names and values. Never cuts values: paths and descriptions matter to their end.
    pub fn facts(&mut self, table: Table) {
        self.0.extend(table.lines(usize::MAX));
    }

    /// Renders the text with or without colours, without spaces at line ends.
    pub fn render(&self, colour: bool) -> String {
        let mut out = String::new();
        for line in &self.0 {
            line.write(colour, &mut out);
            out.truncate(out.trim_end_matches(' ').len());
            out.push('\n');
        }
        out
    }
}

/// Size and capabilities of the place where a page is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// Cells per line of running text.
    pub width: usize,
    /// Whether a terminal shows the page, so that tables are cut at `width`. Files and pipes get whole tables.
    pub terminal: bool,
    /// Whether tones are shown as colours. If not, the text itself must carry their meaning.
    pub colour: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_span_reaches_the_terminal_as_a_command() {
        let hostile = "a\x1b[2J\x1b]0;title\x07b\rc\u{9b}31m\u{202e}d\u{2028}\u{7f}\0\u{e0041}é 漢 e\u{301}";
        let line = Line::plain(hostile);
        let mut page = Page::new();
        page.line(line);
        let text = page.render(true);
        assert_eq!(
            text,
            "a\\u{1b}[2J\\u{1b}]0;title\\u{7}b\\rc\\u{9b}31m\\u{202e}d\\u{2028}\\u{7f}\\0\\u{e0041}é 漢 e\u{301}\n"
        );
        for c in (0..=0x11_0000).filter_map(char::from_u32) {
            assert!(!escaped(&c.to_string()).chars().any(char::is_control), "{c:?}");
        }
    }

    #[test]
    fn tones_are_colours_only_when_asked() {
        let mut page = Page::new();
        page.line(Line::new().with(Tone::Bad, "x").with(Tone::Plain, "y  "));
        assert_eq!(page.render(false), "xy\n");
        assert_eq!(page.render(true), "\x1b[1m\x1b[31mx\x1b[0my\n");
    }
}
