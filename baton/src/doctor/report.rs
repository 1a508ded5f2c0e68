//! Findings for people, and for programs.

use serde_json::json;

use super::finding::{Finding, Level};

/// One line per finding, with what to do under those that ask for it.
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

/// One object: `ok`, and `findings` with `group`, `level`, `found` and `advice` each.
pub(super) fn json(findings: &[Finding]) -> String {
    let ok = count(findings, Level::Bad) == 0;
    format!("{}\n", json!({ "ok": ok, "findings": findings }))
}

fn verdict(findings: &[Finding]) -> String {
    match (count(findings, Level::Bad), count(findings, Level::Warn)) {
        (0, 0) => "all is well".to_owned(),
        (0, warnings) => format!("nothing stands in the way; {warnings} to look at"),
        (bad, warnings) => format!("{bad} in the way, {warnings} to look at"),
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
        assert_eq!(verdict(&[ok.clone(), note]), "all is well");
        assert_eq!(verdict(&[ok, warn.clone()]), "nothing stands in the way; 1 to look at");
        assert_eq!(verdict(&[bad, warn]), "1 in the way, 1 to look at");
    }
}
