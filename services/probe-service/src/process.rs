//! The process of probe-service, from its command line to its exit code.

use std::process::ExitCode;

use clap::Parser;
use quintlet_config::ConfigArgs;
use quintlet_kit::args::{CommonArgs, SubscriberArgs};
use quintlet_kit::notify::Liveness;
use quintlet_kit::service::{self, Service};

/// Probes the containers of a node and remembers the results. Needs neither root nor API credentials.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Args {
    /// Name of this instance; its socket is RUN_DIR/probe/ID.sock. pod-sync shares the pods among all
    /// instances.
    #[arg(long, default_value = "0", value_parser = instance_id, value_name = "ID")]
    id: String,
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    subscribers: SubscriberArgs,
}

fn instance_id(value: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if value.is_empty() || value.len() > 64 || !value.chars().all(fits) {
        return Err("1 to 64 letters, digits, - or _".to_owned());
    }
    Ok(value.to_owned())
}

/// Runs probe-service as its own process. Exits with 64 on a usage error.
#[must_use]
pub fn main() -> ExitCode {
    let loaded = quintlet_config::parse::<Args>(quintlet_config::table::Service::Probe);
    let Args { common, id, subscribers, .. } = &loaded.args;
    let liveness = Liveness::of([common.paths().probe(id)]);
    let service = Service { name: crate::SERVICE, common, node_name: None, liveness };
    let serve = |stop| Box::pin(crate::run(&common.run_dir, id, &common.observer_uid, subscribers, stop));
    service::run(service, || loaded.publish(), serve)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use quintlet_config::table::Service;

    use super::Args;

    #[test]
    fn the_table_of_fields_and_the_flags_are_the_same() {
        Args::command().debug_assert();
        assert_eq!(quintlet_testkit::command_line::differences(&Args::command(), Service::Probe), [""; 0]);
    }
}
