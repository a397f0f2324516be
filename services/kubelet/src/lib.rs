//! `kubelet`: the services in the place of a kubelet, with its command line and the files that kubeadm writes
//! for it.
//!
//! `command` translates the command line to that of `quintctl up`. `files` checks the files of kubeadm before
//! anything on the node is created or changed.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use quintctl::{EXIT_UNAVAILABLE, EXIT_USAGE, up};
use quintlet_config::Exit;
use quintlet_config::diagnostics::render;
use quintlet_localnode::cri;
use quintlet_model::kubernetes::KUBELET_VERSION;

use command::{KubeletCommand, KubeletRequest, KubeletSettings, SharedSettings};
use files::{FLAGS_VARIABLE, FileProblem};

mod authority;
mod command;
mod files;
mod kubeconfig;

/// Time limit of the question for the runtime's cgroup driver.
const RUNTIME_TIMEOUT: Duration = Duration::from_secs(5);

/// Variable that kubeadm's drop-in of `kubelet.service` sets.
const DROP_IN_VARIABLE: &str = "KUBELET_CONFIG_ARGS";

/// Runs the services with the command line of a kubelet. A usage error ends the process.
pub fn main() -> ExitCode {
    let request = match command::read(std::env::args_os().collect()) {
        Ok(request) => request,
        Err(end) => end.exit(),
    };
    let done = match request {
        KubeletRequest::Version => return print_version(),
        KubeletRequest::Check(line) => {
            checked(&line).map(|settings| print_settings(settings.shared(&line.places())))
        }
        KubeletRequest::Run(line) => prepared(&line).map(supervise),
    };
    match done {
        Ok(code) => code,
        Err(NotStarted::Files(problems)) => report(&problems),
        Err(NotStarted::Configuration(end)) => end.exit(),
    }
}

/// The reason not to start.
enum NotStarted {
    Files(Vec<FileProblem>),
    Configuration(Exit),
}

/// Checks the files and the configuration. Only reads.
fn checked(line: &KubeletCommand) -> Result<KubeletSettings, NotStarted> {
    let is_set = |name: &str| std::env::var_os(name).is_some();
    let by_kubeadm = is_set(DROP_IN_VARIABLE);
    files::check_config(&line.places(), by_kubeadm).map_err(|problem| NotStarted::Files(vec![problem]))?;
    let settings = line.load().map_err(NotStarted::Configuration)?;
    let problems = files::check(&settings.files(&line.places()), by_kubeadm, is_set(FLAGS_VARIABLE));
    if !problems.is_empty() {
        return Err(NotStarted::Files(problems));
    }
    Ok(settings)
}

/// Checks the files and the configuration, and returns the options of `quintctl up`. Only reads.
fn prepared(line: &KubeletCommand) -> Result<up::UpArgs, NotStarted> {
    let settings = checked(line)?;
    // `up` and the services report the warnings of the file, but not those of the flags.
    // A closed stderr cannot be reported anywhere.
    let _ = std::io::stderr().write_all(render(&settings.warnings()).as_bytes());
    let mut args = quintctl::up_options(settings.up_line(line)).map_err(NotStarted::Configuration)?;
    (args.extra, args.requested_certificates) = (settings.extra(), settings.certificates());
    Ok(args)
}

#[tokio::main]
async fn supervise(args: up::UpArgs) -> ExitCode {
    match Box::pin(up::run(args)).await {
        Ok(code) => code,
        Err(error) => {
            print_line(&quintlet_kit::error_chain(&error));
            ExitCode::from(error.exit_code())
        }
    }
}

/// Prints settings as JSON, with the cgroup driver that the runtime reports.
#[tokio::main]
async fn print_settings(mut settings: SharedSettings) -> ExitCode {
    let socket = settings.runtime_endpoint.strip_prefix("unix://").unwrap_or(&settings.runtime_endpoint);
    let driver = async { cri::cgroup_driver(cri::connect(Path::new(socket)).await?).await };
    match tokio::time::timeout(RUNTIME_TIMEOUT, driver).await {
        Ok(Ok(driver)) => settings.runtime_cgroup_driver = driver.map(str::to_owned),
        Ok(Err(error)) => settings.runtime_error = Some(quintlet_kit::error_chain(&error)),
        Err(_) => settings.runtime_error = Some(format!("no response within {}s", RUNTIME_TIMEOUT.as_secs())),
    }
    let text = serde_json::to_string_pretty(&settings).unwrap_or_default();
    // A closed standard output leaves only the exit code.
    let written = writeln!(std::io::stdout().lock(), "{text}");
    if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints what kubeadm and scripts parse (`component-base/version/verflag`).
fn print_version() -> ExitCode {
    // A closed standard output leaves only the exit code.
    let written = writeln!(std::io::stdout().lock(), "Kubernetes {KUBELET_VERSION}");
    if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints a line per problem. Invalid content precedes missing files in the exit code, since it must be
/// changed by hand.
fn report(problems: &[FileProblem]) -> ExitCode {
    problems.iter().for_each(|problem| print_line(&problem.to_string()));
    let is_invalid = problems.iter().any(FileProblem::is_invalid);
    ExitCode::from(if is_invalid { EXIT_USAGE } else { EXIT_UNAVAILABLE })
}

fn print_line(text: &str) {
    // A closed standard error leaves only the exit code.
    let _ = writeln!(std::io::stderr().lock(), "kubelet: {}", text.replace('\n', " "));
}
