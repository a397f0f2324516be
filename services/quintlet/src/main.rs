//! The services and quintctl in one file, run by its name: a node that runs all of them has their common code in
//! memory once. `pod-sync` and the others are links to it; without a link, `quintlet pod-sync …` is the same.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use quintlet_kit::exit_code;

/// sysexits.h: EX_USAGE.
const USAGE: u8 = 64;

type Run = fn() -> ExitCode;

const PROGRAMS: [(&str, Run); 7] = [
    ("cri-proxy", || exit_code("cri-proxy", cri_proxy::main())),
    ("node-api", || exit_code("node-api", node_api::main())),
    ("pleg-service", || exit_code("pleg-service", pleg_service::main())),
    ("pod-sync", pod_sync::main),
    ("probe-service", || exit_code("probe-service", probe_service::main())),
    ("quintctl", quintctl::main),
    ("status-reporter", || exit_code("status-reporter", status_reporter::main())),
];

fn main() -> ExitCode {
    quintlet_kit::build::set_commit(env!("QUINTLET_BUILT_FROM"));
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

// Becomes what its first argument names, so that each reads its command line as if it were alone.
fn by_argument(mut line: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(name) = line.next().filter(|name| program(name).is_some()) else {
        let names = PROGRAMS.map(|(name, _)| name).join("|");
        return tell(USAGE, &format!("usage: quintlet {names} [ARGUMENT]..."));
    };
    let error = match std::env::current_exe() {
        Ok(own) => Command::new(own).arg0(&name).args(line).exec(),
        Err(error) => error,
    };
    tell(1, &format!("quintlet: {} cannot be run: {error}", name.display()))
}

fn tell(code: u8, text: &str) -> ExitCode {
    use std::io::Write as _;
    // Without a standard error there is nobody to tell.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
    ExitCode::from(code)
}
