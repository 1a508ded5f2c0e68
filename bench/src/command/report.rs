//! `baton bench report`: makes a page and a table from reports.

use std::path::PathBuf;

use clap::Args;

use crate::command::{CommandOutcome, say, tell};
use crate::error::{Result, write_text};
use crate::report::{RunReport, html, markdown};

#[derive(Clone, Debug, Args)]
pub struct ReportArgs {
    /// Reports written by serve, ab or faults
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// File for the HTML page
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// The title of the page
    #[arg(long, default_value = "baton bench")]
    pub title: String,
}

pub fn run(args: &ReportArgs) -> Result<CommandOutcome> {
    let runs: Vec<_> = args.files.iter().map(|path| RunReport::read(path)).collect::<Result<_>>()?;
    say(&markdown::table(&runs).to_markdown());
    say(&markdown::remark_list(&runs));
    runs.iter().for_each(|run| say(&markdown::provenance(run)));
    if let Some(path) = &args.html {
        write_text(path, &html::page(&args.title, &runs)?)?;
        tell(&format!("page: {}", path.display()));
    }
    Ok(CommandOutcome::Well)
}
