//! The command line and the dispatch to its commands.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use quintctl_install::{InstallError, Machine};
use quintlet_kit::args::paths::Paths;

use crate::error::{EXIT_FAILURE, EXIT_USAGE, Error};
use crate::out::{Format, print};
use crate::streaming::{attach, exec, forward};
use crate::{
    bundle, claims, config, cpus, devices, events, explain, health, image, list_pods, log_level, logs,
    pressure, profile, protos, retry, top, trace, up, version, volumes, watch,
};

/// Operate Quintlet on this machine.
#[derive(Debug, Parser)]
#[command(
    name = "quintctl",
    version,
    after_help = "Exit codes: 0 success, 1 not found or not healthy, 64 usage error, 69 a service does not answer, a file is missing, or another agent runs."
)]
pub(crate) struct Cli {
    /// Directory of the services' sockets [default: /run/quintlet]
    #[arg(long, global = true, value_name = "DIR", env = "QUINTLET_RUN_DIR")]
    pub(crate) run_dir: Option<PathBuf>,
    /// Format of the output
    #[arg(short, long, global = true, value_name = "FORMAT", value_enum, default_value_t)]
    pub(crate) output: Format,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List pods and what each pod waits for
    Pods(list_pods::PodsArgs),
    /// Show changes as they happen: pods, containers, probes, services
    Watch(watch::WatchArgs),
    /// Explain the state of a pod: the last decision, its inputs, and what the pod waits for
    Explain(explain::ExplainArgs),
    /// Retry a pod now that waits with reason InternalError
    Retry(retry::RetryArgs),
    /// Print the log of a container
    Logs(logs::LogsArgs),
    /// Run a command in a container and exit with its exit code
    Exec(exec::ExecArgs),
    /// Attach to the main process of a container
    Attach(attach::AttachArgs),
    /// Forward local ports to ports of a pod
    PortForward(forward::ForwardArgs),
    /// Show the operations of the services for a pod, with the duration of each step
    Trace(trace::TraceArgs),
    /// List events of pods
    Events(events::EventsArgs),
    /// Show the pressure on memory, disks and process IDs, and the pod that is evicted next
    Pressure,
    /// List volumes of pods, with their state, the call in progress and the last error
    Volumes(volumes::VolumesArgs),
    /// Show the CPUs of the machine, the memory of its NUMA nodes, and the containers that have some of their
    /// own
    Cpus,
    /// Show the resources of device plugins, and the containers that hold their devices
    Devices,
    /// Show the drivers of dynamic resource allocation, and the claims that are prepared for pods
    Claims,
    /// Show the resource usage of services and pods, and the delays of PLEG and probes
    Top(top::TopArgs),
    /// Show or change the log filter of a running service
    LogLevel(log_level::LogLevelArgs),
    /// Take a CPU profile of a running service, or show what its heap has
    Profile(profile::ProfileArgs),
    /// Check the health of all services, or of one
    Health(health::HealthArgs),
    /// Show the installed and the running versions
    Version,
    /// Collect diagnostic data in an archive, without secrets
    DebugBundle(bundle::BundleArgs),
    /// Run the five services on this machine until interrupted
    Up(Box<up::UpArgs>),
    /// Show the effective configuration of a file, with the origin of each value
    Config(config::ConfigArgs),
    /// Manage images
    Image(image::ImageArgs),
    /// Install Quintlet in the place of a kubelet or beside it; quintctl uninstall undoes it
    Install(Box<quintctl_install::InstallArgs>),
    /// Undo quintctl install, also one that was interrupted
    Uninstall(quintctl_install::UninstallArgs),
    /// Replace the binary of the running services, one service after the other; no pod restarts
    Upgrade(quintctl_install::UpgradeArgs),
    /// Print the protobuf contract for subscribers, as a tar archive: quintctl protos | tar x
    Protos,
    /// Print a shell completion script
    Completions {
        /// Shell to complete for
        shell: clap_complete::Shell,
    },
}

/// Runs the command.
///
/// # Errors
/// The command failed. The type is the command's own: [`Error`], [`up::UpError`] or an error of localnode.
pub(crate) async fn run(cli: Cli) -> Result<ExitCode, Box<dyn std::error::Error + Send + Sync>> {
    let paths = Paths::new(cli.run_dir.as_deref().unwrap_or(Path::new(quintlet_kit::args::RUN_DIR)));
    let format = cli.output;
    let result = match cli.command {
        Command::Up(args) => return Ok(Box::pin(up::run(*args)).await?),
        Command::Install(args) => {
            let machine = Machine::this(args.bin_dir.as_deref())?;
            Ok(quintctl_install::install(&args, &machine, &mut std::io::stdout())?)
        }
        Command::Uninstall(args) => {
            let machine = Machine::this(None)?;
            Ok(quintctl_install::uninstall(&args, &machine, &mut std::io::stdout())?)
        }
        Command::Upgrade(args) => {
            let machine = Machine::this(args.bin_dir.as_deref())?;
            Ok(quintctl_install::upgrade(&args, paths.run(), &machine, &mut std::io::stdout())?)
        }
        Command::Image(args) => {
            image::run(args, paths.run()).await?;
            Ok(())
        }
        Command::Pods(args) => list_pods::run(args, &paths, format).await,
        Command::Watch(args) => Box::pin(watch::run(args, &paths, format)).await,
        Command::Explain(args) => explain::run(args, &paths, format).await,
        Command::Retry(args) => retry::run(args, &paths, format).await,
        Command::Logs(args) => Box::pin(logs::run(args, &paths)).await,
        Command::Exec(args) => return Ok(Box::pin(exec::run(args, &paths)).await?),
        Command::Attach(args) => return Ok(Box::pin(attach::run(args, &paths)).await?),
        Command::PortForward(args) => Box::pin(forward::run(args, &paths)).await,
        Command::Top(args) => Box::pin(top::run(args, &paths, format)).await,
        Command::Trace(args) => trace::run(args, &paths, format).await,
        Command::Events(args) => events::run(args, &paths, format).await,
        Command::Pressure => pressure::run(&paths, format).await,
        Command::Volumes(args) => volumes::run(args, &paths, format).await,
        Command::LogLevel(args) => log_level::run(args, &paths, format).await,
        Command::Profile(args) => Box::pin(profile::run(args, &paths)).await,
        Command::Cpus => cpus::run(&paths, format).await,
        Command::Devices => devices::run(&paths, format).await,
        Command::Claims => claims::run(&paths, format).await,
        Command::Health(args) => match health::run(&args, &paths, format).await {
            Ok(true) => Ok(()),
            Ok(false) => return Ok(ExitCode::from(EXIT_FAILURE)),
            Err(error) => Err(error),
        },
        Command::Config(args) => match config::run(args) {
            Ok(true) => Ok(()),
            Ok(false) => return Ok(ExitCode::from(EXIT_USAGE)),
            Err(error) => Err(error),
        },
        Command::DebugBundle(args) => Box::pin(bundle::run(args, &paths)).await,
        Command::Version => version::run(&paths, format).await,
        Command::Protos => protos::run(),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "quintctl", &mut script);
            print(script)
        }
    };
    match result {
        Err(error) if error.is_closed_output() => Ok(ExitCode::SUCCESS),
        Err(error) => Err(error.into()),
        Ok(()) => Ok(ExitCode::SUCCESS),
    }
}

/// Returns the exit code for an error of [`run`].
#[must_use]
pub(crate) fn exit_code(error: &(dyn std::error::Error + 'static)) -> ExitCode {
    let own = error.downcast_ref::<Error>().map(Error::exit_code);
    let installing = error.downcast_ref::<InstallError>().map(InstallError::exit_code);
    let starting = error.downcast_ref::<up::UpError>().map(up::UpError::exit_code);
    ExitCode::from(own.or(installing).or(starting).unwrap_or(EXIT_FAILURE))
}

/// Returns a hint for a forgotten `--run-dir`: `make run` keeps its sockets below the working directory.
#[must_use]
pub(crate) fn hint(error: &(dyn std::error::Error + 'static), cwd: &Path) -> Option<String> {
    let unreachable = matches!(error.downcast_ref::<Error>(), Some(Error::Unreachable { path, .. }) if path.starts_with(quintlet_kit::args::RUN_DIR));
    let local = Path::new(".run/run");
    (unreachable && cwd.join(local).is_dir())
        .then(|| format!("quintctl: {} exists; try --run-dir {}", local.display(), local.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed_and_accepts_the_run_directory_at_any_position() {
        Cli::command().debug_assert();
        for line in [["quintctl", "--run-dir", "/r", "pods"], ["quintctl", "pods", "--run-dir", "/r"]] {
            assert_eq!(
                Cli::try_parse_from(line).unwrap().run_dir.as_deref(),
                Some(Path::new("/r")),
                "{line:?}"
            );
        }
        // Without the option, `up` chooses the directory.
        let cli = Cli::try_parse_from(["quintctl", "up", "--private-containerd"]).unwrap();
        assert!(matches!(cli.command, Command::Up(args) if args.run_dir.is_none()));
        let cli = Cli::try_parse_from(["quintctl", "up", "--private-containerd", "--run-dir", "/r"]).unwrap();
        assert!(matches!(cli.command, Command::Up(args) if args.run_dir.as_deref() == Some(Path::new("/r"))));
    }

    #[test]
    fn a_run_directory_in_the_working_directory_is_suggested() {
        let dir = tempfile::tempdir().unwrap();
        let error = |path: &str| Error::Unreachable {
            service: "pod-sync".into(),
            path: path.into(),
            source: std::io::ErrorKind::NotFound.into(),
        };
        assert_eq!(hint(&error("/run/quintlet/podsync/podsync.sock"), dir.path()), None);
        std::fs::create_dir_all(dir.path().join(".run/run")).unwrap();
        assert!(hint(&error("/run/quintlet/podsync/podsync.sock"), dir.path()).is_some());
        assert_eq!(hint(&error("/elsewhere/podsync.sock"), dir.path()), None);
    }
}
