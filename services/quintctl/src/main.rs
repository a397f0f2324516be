//! The `quintctl` binary.

use std::io::Write as _;
use std::process::ExitCode;

use quintctl::cli::{self, Cli};

#[tokio::main]
async fn main() -> ExitCode {
    match Box::pin(cli::run(quintlet_kit::args::parse::<Cli>())).await {
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
