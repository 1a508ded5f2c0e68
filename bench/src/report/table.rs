//! A table that can be written as Markdown or as HTML.

use std::fmt::Write as _;

use crate::report::plot::escape;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    pub header: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// Returns the table as Markdown. Columns are as wide as their widest cell, so that it is readable on a
    /// terminal.
    pub fn to_markdown(&self) -> String {
        let escaped = |cell: &String| cell.replace('|', "\\|");
        let lines: Vec<Vec<String>> = std::iter::once(&self.header)
            .chain(&self.rows)
            .map(|row| row.iter().map(escaped).collect())
            .collect();
        let width = |column: usize| {
            let cells = lines.iter().filter_map(|line| line.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0).max(1)
        };
        let widths: Vec<usize> = (0..self.header.len()).map(width).collect();
        let mut text = String::new();
        for (nth, line) in lines.iter().enumerate() {
            for (cell, width) in line.iter().zip(&widths) {
                let _ = write!(text, "| {cell:<width$} ");
            }
            text.push_str("|\n");
            if nth == 0 {
                widths.iter().for_each(|width| text.push_str(&format!("|{}", "-".repeat(width + 2))));
                text.push_str("|\n");
            }
        }
        text
    }

    pub fn to_html(&self) -> String {
        let line = |tag: &str, cells: &[String]| {
            let cells: String = cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect();
            format!("<tr>{cells}</tr>\n")
        };
        let rows: String = self.rows.iter().map(|row| line("td", row)).collect();
        format!("<div class=\"wide\"><table>\n{}{rows}</table></div>\n", line("th", &self.header))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        let table = Table { header: row(["", "A", "B"]), rows: vec![row(["ttft p50", "12 ms", "9|1"])] };
        let expected =
            "|          | A     | B    |\n|----------|-------|------|\n| ttft p50 | 12 ms | 9\\|1 |\n";
        assert_eq!(table.to_markdown(), expected);
    }
}
