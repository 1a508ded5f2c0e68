//! Tests that the scenarios are valid, and that the index of measurements is complete.

use std::path::{Path, PathBuf};

use bench::command::BenchCommand;
use bench::command::scenario::{Scenario, ScenarioArgs};
use bench::faults::Schedule;

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the project").to_owned()
}

fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(project().join(folder)).expect(folder);
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut files: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|found| found == ending)).collect();
    files.sort();
    files
}

fn name(path: &Path) -> String {
    path.file_name().expect("a file").to_string_lossy().into_owned()
}

fn args(file: &Path, ablate: bool) -> ScenarioArgs {
    ScenarioArgs { file: file.to_owned(), url: None, ablate, data: Some("trace.jsonl".into()), more: vec![] }
}

fn command(file: &Path, ablate: bool) -> BenchCommand {
    let scenario = Scenario::read(file).expect("it parses");
    let command = scenario.command(&args(file, ablate));
    command.unwrap_or_else(|error| panic!("{}: {}", file.display(), error.in_full()))
}

#[test]
fn every_scenario_is_one_command_with_its_ablation() {
    let scenarios = files("bench/scenarios", "toml");
    assert!(scenarios.len() >= 6);
    for file in scenarios {
        let scenario = Scenario::read(&file).expect("it parses");
        assert!(scenario.question.ends_with('?') && !scenario.ablation.off.is_empty(), "{}", file.display());
        let (plain, ablated) =
            (format!("{:?}", command(&file, false)), format!("{:?}", command(&file, true)));
        let servers_differ =
            scenario.server_words(&args(&file, true)) != scenario.server_words(&args(&file, false));
        assert!(plain != ablated || servers_differ, "{}: the ablation changes nothing", file.display());
    }
}

#[test]
fn every_schedule_is_sound() {
    for file in files("bench/scenarios/faults", "toml") {
        Schedule::read(&file).unwrap_or_else(|error| panic!("{}", error.in_full()));
    }
}

#[test]
fn the_index_names_every_scenario_and_every_measurement() {
    let index = std::fs::read_to_string(project().join("docs/measurements/README.md")).expect("an index");
    for file in files("bench/scenarios", "toml") {
        assert!(index.contains(&format!("`{}`", name(&file))), "{} is not in the index", name(&file));
    }
    let measured = ["md", "html", "json", "png"].map(|ending| files("docs/measurements", ending)).concat();
    for file in measured.iter().filter(|file| name(file) != "README.md") {
        assert!(index.contains(&format!("({})", name(file))), "{} is not in the index", name(file));
    }
}

#[test]
fn the_index_names_nothing_that_is_not_there() {
    let folder = project().join("docs/measurements");
    let index = std::fs::read_to_string(folder.join("README.md")).expect("an index");
    for link in index.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        assert!(link.starts_with("http") || folder.join(link).exists(), "{link} is not there");
    }
    for word in index.split('`').filter(|word| word.ends_with(".toml") && !word.contains([' ', '\n', '/'])) {
        assert!(project().join("bench/scenarios").join(word).exists(), "{word} is not there");
    }
}
