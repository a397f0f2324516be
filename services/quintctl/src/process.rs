//! Entry point of the process: reads the command line, runs the command and returns the exit code.

use std::io::Write as _;
use std::process::ExitCode;

use crate::{cli, parse, run_as};

/// Runs `quintctl`. A usage error ends the process.
pub fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    if words.next().is_some_and(|word| word == run_as::NAME) {
        // The runtime is not started yet: the user must change while the process has a single thread.
        let error = run_as::run(&words.collect::<Vec<_>>());
        // A closed standard error leaves only the exit code.
        let _ = writeln!(std::io::stderr().lock(), "quintctl: failed to run as another user: {error}");
        return ExitCode::FAILURE;
    }
    command()
}

#[tokio::main]
async fn command() -> ExitCode {
    let line = match parse::read(std::env::args_os().collect()) {
        Ok(line) => line,
        Err(end) => end.exit(),
    };
    match Box::pin(cli::run(line)).await {
        Ok(code) => code,
        Err(error) => {
            let mut stderr = std::io::stderr().lock();
            // A closed standard error leaves only the exit code.
            let _ = writeln!(stderr, "quintctl: {}", quintlet_kit::error_chain(error.as_ref()));
            let hint = std::env::current_dir().ok().and_then(|cwd| cli::hint(error.as_ref(), &cwd));
            if let Some(hint) = hint {
                let _ = writeln!(stderr, "{hint}");
            }
            cli::exit_code(error.as_ref())
        }
    }
}
