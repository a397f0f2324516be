//! One binary for eight programs, which its name or its first argument selects.

use std::path::Path;
use std::process::{Command, Output};

const PROGRAM: &str = env!("CARGO_BIN_EXE_quintlet");
const NAMES: [&str; 7] =
    ["cri-proxy", "node-api", "pleg-service", "pod-sync", "probe-service", "quintctl", "status-reporter"];

fn run(program: &Path, args: &[&str]) -> Output {
    Command::new(program).args(args).output().unwrap()
}

#[test]
fn a_link_runs_the_program_of_its_name() {
    let dir = tempfile::tempdir().unwrap();
    for name in NAMES {
        let link = dir.path().join(name);
        std::os::unix::fs::symlink(PROGRAM, &link).unwrap();
        let output = run(&link, &["--version"]);
        assert!(output.status.success(), "{output:?}");
        let output_text = String::from_utf8(output.stdout).unwrap();
        assert!(output_text.starts_with(&format!("{name} ")), "{name} says {output_text:?}");
        // A usage error has the program's own name.
        let output = run(&link, &["--no-such-flag"]);
        assert_eq!(output.status.code(), Some(64), "{output:?}");
    }
}

#[test]
fn the_first_argument_selects_the_program() {
    for name in NAMES {
        let output = run(Path::new(PROGRAM), &[name, "--version"]);
        let output_text = String::from_utf8(output.stdout).unwrap();
        assert!(output_text.starts_with(&format!("{name} ")), "{name} says {output_text:?}");
    }
}

#[test]
fn an_unknown_name_lists_the_programs() {
    for args in [&[][..], &["no-such-program"], &["--version"]] {
        let output = run(Path::new(PROGRAM), args);
        assert_eq!(output.status.code(), Some(64), "{args:?}: {output:?}");
        let output_text = String::from_utf8(output.stderr).unwrap();
        assert!(NAMES.iter().all(|name| output_text.contains(name)), "{args:?}: {output_text}");
    }
}
