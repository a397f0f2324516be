//! All services and quintctl in one binary, selected by the name that it is run by. Processes of one binary
//! share its code in memory.
//!
//! `pod-sync` and the other programs are links to this binary; `kubelet` is one for kubeadm. Without a link,
//! `quintlet pod-sync …` runs the same program.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

#[global_allocator]
static ALLOCATOR: quintlet_kit::service::Allocator = quintlet_kit::service::Allocator;

/// sysexits.h: EX_USAGE.
const USAGE: u8 = 64;

type Run = fn() -> ExitCode;

const PROGRAMS: [(&str, Run); 8] = [
    ("cri-proxy", cri_proxy::main),
    ("kubelet", quintlet_kubelet::main),
    ("node-api", node_api::main),
    ("pleg-service", pleg_service::main),
    ("pod-sync", pod_sync::main),
    ("probe-service", probe_service::main),
    ("quintctl", quintctl::main),
    ("status-reporter", status_reporter::main),
];

const NAMES: [&str; PROGRAMS.len()] = {
    let mut names = [""; PROGRAMS.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = PROGRAMS[at].0;
        at += 1;
    }
    names
};

fn main() -> ExitCode {
    quintlet_kit::service::register_process_metrics();
    quintlet_kit::build::set_commit(env!("QUINTLET_BUILT_FROM"));
    quintlet_kit::build::set_programs(&NAMES);
    let mut line = std::env::args_os();
    let called = line.next().unwrap_or_default();
    match program(Path::new(&called).file_name().unwrap_or_default()) {
        Some(run) => run(),
        None => by_argument(line),
    }
}

fn program(name: &OsStr) -> Option<Run> {
    PROGRAMS.iter().find(|(known, _)| name == *known).map(|(_, run)| *run)
}

/// Executes this binary again under the name of its first argument, so that each program parses the command
/// line as its own.
fn by_argument(mut line: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(name) = line.next().filter(|name| program(name).is_some()) else {
        return fail(USAGE, &format!("usage: quintlet {} [ARGUMENT]...", NAMES.join("|")));
    };
    let error = match std::env::current_exe() {
        Ok(own) => Command::new(own).arg0(&name).args(line).exec(),
        Err(error) => error,
    };
    fail(1, &format!("quintlet: failed to run {}: {error}", name.display()))
}

fn fail(code: u8, text: &str) -> ExitCode {
    use std::io::Write as _;
    // A closed stderr cannot be reported anywhere.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
    ExitCode::from(code)
}
