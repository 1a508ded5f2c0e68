//! The findings as text for people and for programs.

use serde_json::json;

use super::finding::{Finding, Level};

/// Returns one line per finding. Advice stands below those that are not OK.
pub(super) fn table(findings: &[Finding]) -> String {
    let mut table = String::new();
    for Finding { group, level, found, advice } in findings {
        table.push_str(&format!("{:<5} {group:<9} {found}\n", level.as_str()));
        if *level != Level::Ok {
            table.push_str(&format!("{:<15} {advice}\n", ""));
        }
    }
    table + &format!("\n{}\n", verdict(findings))
}

/// Returns the findings as one JSON object: `ok`, and `findings`, each with `group`, `level`, `found` and
/// `advice`.
pub(super) fn json(findings: &[Finding]) -> String {
    let ok = count(findings, Level::Bad) == 0;
    format!("{}\n", json!({ "ok": ok, "findings": findings }))
}

fn verdict(findings: &[Finding]) -> String {
    match (count(findings, Level::Bad), count(findings, Level::Warn)) {
        (0, 0) => "no problems found".to_owned(),
        (0, warnings) => format!("no errors, warnings: {warnings}"),
        (bad, warnings) => format!("errors: {bad}, warnings: {warnings}"),
    }
}

fn count(findings: &[Finding], level: Level) -> usize {
    findings.iter().filter(|finding| finding.level == level).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_counts_what_matters() {
        let ok = Finding::ok("ports", "free");
        let note = Finding::note("gpu", "none", "take a CPU model");
        let warn = Finding::warn("host", "small", "enlarge it");
        let bad = Finding::bad("ports", "taken", "take another");
        assert_eq!(verdict(&[ok.clone(), note]), "no problems found");
        assert_eq!(verdict(&[ok, warn.clone()]), "no errors, warnings: 1");
        assert_eq!(verdict(&[bad, warn]), "errors: 1, warnings: 1");
    }
}
