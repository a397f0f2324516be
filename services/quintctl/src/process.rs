//! The process: from its command line to its exit code.

use std::io::Write as _;
use std::process::ExitCode;

use crate::{cli, config, run_as};

/// Runs `quintctl` as its own process: reads the command line, and ends it on a usage error.
pub fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    if words.next().is_some_and(|word| word == run_as::NAME) {
        // Before there is a second thread.
        let error = run_as::run(&words.collect::<Vec<_>>());
        // Without a standard error there is nobody to tell.
        let _ = writeln!(std::io::stderr().lock(), "quintctl: cannot run as another user: {error}");
        return ExitCode::FAILURE;
    }
    command()
}

#[tokio::main]
async fn command() -> ExitCode {
    let line = match config::read(std::env::args_os().collect()) {
        Ok(line) => line,
        Err(end) => end.exit(),
    };
    match Box::pin(cli::run(line)).await {
        Ok(code) => code,
        Err(error) => {
            let mut stderr = std::io::stderr().lock();
            // Without a standard error there is nobody to tell.
            let _ = writeln!(stderr, "quintctl: {}", quintlet_kit::error_chain(error.as_ref()));
            let hint = std::env::current_dir().ok().and_then(|cwd| cli::hint(error.as_ref(), &cwd));
            if let Some(hint) = hint {
                let _ = writeln!(stderr, "{hint}");
            }
            cli::exit_code(error.as_ref())
        }
    }
}
