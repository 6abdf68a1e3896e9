//! Tables. Columns get the width that they need; if the terminal is too narrow, the widest are cut.

use crate::line::{Line, Tone};

/// Alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// A table with an indent and an optional header.
#[derive(Debug, Clone)]
pub struct Table {
    aligns: Vec<Align>,
    rows: Vec<Vec<Line>>,
    indent: usize,
}

const GAP: usize = 2;
const MIN_COLUMN_WIDTH: usize = 8;

impl Table {
    /// Creates a table. `columns` has one letter per column: `l` left, `r` right.
    pub fn new(columns: &str) -> Self {
        let aligns = columns.chars().map(|c| if c == 'r' { Align::Right } else { Align::Left }).collect();
        Self { aligns, rows: Vec::new(), indent: 2 }
    }

    /// Adds the names of the columns.
    #[must_use]
    pub fn header(mut self, names: &[&str]) -> Self {
        self.rows.push(names.iter().map(|n| Line::new().with(Tone::Dim, n)).collect());
        self
    }

    /// Sets the number of spaces before each line.
    #[must_use]
    pub fn indent(mut self, cells: usize) -> Self {
        self.indent = cells;
        self
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Line>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Adds a row of plain text.
    pub fn texts<S: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.row(cells.into_iter().map(Line::plain));
    }

    /// Renders the table as lines of at most `width` cells.
    pub fn lines(self, width: usize) -> Vec<Line> {
        let widths = self.widths(width);
        let mut lines = Vec::with_capacity(self.rows.len());
        for row in self.rows {
            let mut line = Line::plain(" ".repeat(self.indent));
            for (i, cell) in row.into_iter().enumerate() {
                let cells = widths.get(i).copied().unwrap_or_default();
                let cell = cell.cut(cells);
                let pad = " ".repeat(cells.saturating_sub(cell.width()));
                if i > 0 {
                    line.push(Tone::Plain, " ".repeat(GAP));
                }
                match self.aligns.get(i) {
                    Some(Align::Right) => {
                        line.push(Tone::Plain, pad);
                        line.append(cell);
                    }
                    _ => {
                        line.append(cell);
                        line.push(Tone::Plain, pad);
                    }
                }
            }
            lines.push(line);
        }
        lines
    }

    fn widths(&self, width: usize) -> Vec<usize> {
        let mut widths = vec![0; self.aligns.len()];
        for row in &self.rows {
            for (widest, cell) in widths.iter_mut().zip(row) {
                *widest = cell.width().max(*widest);
            }
        }
        let gaps = self.indent + GAP * widths.len().saturating_sub(1);
        let mut excess = (widths.iter().sum::<usize>() + gaps).saturating_sub(width);
        while excess > 0 {
            let Some(widest) = widths.iter_mut().max() else {
                break;
            };
            if *widest <= MIN_COLUMN_WIDTH {
                break;
            }
            *widest -= 1;
            excess -= 1;
        }
        widths
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{Page, View};

    #[test]
    fn columns_line_up_by_cells_and_the_widest_gives_way() {
        let mut table = Table::new("lrl").header(&["text", "n", "where"]);
        table.texts(["漢字", "7", "a/very/long/path/to/some/file.jsonl"]);
        table.texts(["abc", "1,234", "b"]);
        let mut page = Page::new();
        let view = View { width: 40, terminal: true, colour: false };
        page.table(table, view);
        insta::assert_snapshot!(page.render(false), @r"
        text      n  where
        漢字      7  a/very/long/path/to/some…
        abc   1,234  b
        ");
    }
}
