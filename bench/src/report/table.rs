//! Rows of cells, written as Markdown or as HTML, so that page and document never differ.

use std::fmt::Write as _;

use crate::report::plot::escape;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    pub header: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

impl Table {
    pub fn to_markdown(&self) -> String {
        let line = |cells: &[String]| {
            let cells: Vec<_> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
            format!("| {} |\n", cells.join(" | "))
        };
        let mut text = line(&self.header);
        let _ = writeln!(text, "|{}", "---|".repeat(self.header.len()));
        self.rows.iter().for_each(|row| text.push_str(&line(row)));
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
