//! `quintctl profile`: a CPU profile of a running service, or its heap.
//!
//! The service sends addresses. The names are read here, from the symbols of its files ([`name_functions`]).

use std::io::{self, IsTerminal as _};
use std::path::PathBuf;
use std::time::Duration;

use quintctl_measures::{fold, lines, name_functions, svg};
use quintlet_kit::args::paths::{CriSocket, Paths};
use quintlet_kit::messages::whole;
use quintlet_profile::cpu::{DEFAULT_HERTZ, MAX_HERTZ, MAX_SECONDS};
use quintlet_profile::format::Profile;
use quintlet_proto::debug::v1::control_client::ControlClient;
use quintlet_proto::debug::v1::{ProfileKind, ProfileReply, ProfileRequest};

use crate::client::Peer;
use crate::error::Error;
use crate::health::ServiceArg;
use crate::out::print;

/// Time that a service has for a profile in addition to its duration: on a busy machine the profiler takes
/// seconds to start.
const MARGIN: Duration = Duration::from_secs(30);

/// Take a CPU profile of a running service, or show what its heap has.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ProfileArgs {
    /// Service to profile
    pub(crate) service: ServiceArg,
    /// Instance of probe-service, such as `probe-1`, if there are several here
    #[arg(long, value_name = "NAME")]
    pub(crate) instance: Option<String>,
    /// Duration of the profile
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SECONDS)))]
    pub(crate) seconds: u32,
    /// Samples per second of CPU time. The kernel takes as many as it has timer ticks at most
    #[arg(long, value_name = "HERTZ", default_value_t = DEFAULT_HERTZ, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_HERTZ)))]
    pub(crate) hertz: u32,
    /// Format of the profile
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: ProfileFormat,
    /// File to write [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Write the allocations that are in use, as text of jemalloc for jeprof. The service needs a build with
    /// the feature heap-profile and a start with _RJEM_MALLOC_CONF=prof:true
    #[arg(long, conflicts_with_all = ["seconds", "hertz", "format"])]
    pub(crate) heap: bool,
}

/// Format of a CPU profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum ProfileFormat {
    /// A flame graph as SVG
    #[default]
    Flamegraph,
    /// A line per stack with its number of samples
    Folded,
    /// A file for go tool pprof
    Pprof,
}

/// Takes the profile and writes it.
///
/// # Errors
/// The service does not answer, takes another profile, or does not allow this user; there are several
/// instances; the file cannot be written.
pub(crate) async fn run(args: ProfileArgs, paths: &Paths) -> Result<(), Error> {
    let is_text = args.heap || args.format == ProfileFormat::Folded;
    if args.file.is_none() && !is_text && io::stdout().is_terminal() {
        return Err(Error::os("write the profile")(io::Error::other(
            "standard output is a terminal; use --file FILE",
        )));
    }
    let peer = choose(peers(args.service, paths), args.instance.as_deref())?;
    let bytes = if args.heap {
        let request = ProfileRequest { kind: ProfileKind::Heap.into(), seconds: 0, hertz: 0 };
        fetch(&peer, request, MARGIN).await?
    } else {
        let request =
            ProfileRequest { kind: ProfileKind::Cpu.into(), seconds: args.seconds, hertz: args.hertz };
        let limit = Duration::from_secs(args.seconds.into()).saturating_add(MARGIN);
        convert(&peer, fetch(&peer, request, limit).await?, args.format).await?
    };
    match args.file {
        None => print(bytes),
        Some(file) => {
            std::fs::write(&file, &bytes).map_err(Error::os(format!("write {}", file.display())))?;
            print(format!("{}: {} KiB\n", file.display(), bytes.len().div_ceil(1024)))
        }
    }
}

/// Returns the sockets that have the method.
fn peers(service: ServiceArg, paths: &Paths) -> Vec<Peer> {
    match service {
        ServiceArg::CriProxy => vec![Peer::new("cri-proxy", paths.cri(CriSocket::Admin))],
        service => service.peers(paths),
    }
}

/// Returns the instance to profile.
fn choose(mut peers: Vec<Peer>, instance: Option<&str>) -> Result<Peer, Error> {
    let name = |peer: &Peer| peer.service.rsplit(' ').next().unwrap_or_default().to_owned();
    let names: Vec<String> = peers.iter().map(name).collect();
    match instance {
        Some(wanted) => peers
            .into_iter()
            .find(|peer| name(peer) == wanted)
            .ok_or_else(|| Error::NotFound(format!("no instance {wanted}; there are: {}", names.join(", ")))),
        None if peers.len() > 1 => Err(Error::NotFound(format!(
            "there are several instances; use --instance with one of: {}",
            names.join(", ")
        ))),
        None => peers.pop().ok_or_else(|| Error::NotFound("no instance is here".to_owned())),
    }
}

async fn fetch(peer: &Peer, request: ProfileRequest, limit: Duration) -> Result<Vec<u8>, Error> {
    let mut client = ControlClient::new(peer.channel().await?);
    // The answer begins once the profiler has its tables.
    let call = tokio::time::timeout(MARGIN, client.profile(request));
    let answer = async {
        let stream = call.await.unwrap_or_else(|_| Err(late(MARGIN)));
        match tokio::time::timeout(limit, whole::<ProfileReply>(async { stream })).await {
            Ok(profile) => profile,
            Err(_) => Err(late(limit)),
        }
    };
    answer.await.map(|profile| profile.into_inner().data).map_err(|status| peer.error(&status))
}

fn late(limit: Duration) -> tonic::Status {
    tonic::Status::unavailable(format!("no response within {}s", limit.as_secs()))
}

/// Adds the names of functions, and returns the format that was asked for.
async fn convert(peer: &Peer, bytes: Vec<u8>, format: ProfileFormat) -> Result<Vec<u8>, Error> {
    let invalid = |error: io::Error| Error::InvalidResponse {
        service: "the service",
        what: format!("no profile: {}", quintlet_kit::error_chain(&error)),
    };
    let mut profile = Profile::decode_compressed(&bytes).map_err(invalid)?;
    let pid = crate::top::server_pid(peer).await;
    name_functions(&mut profile, pid);
    let folded = fold(&profile);
    Ok(match format {
        ProfileFormat::Flamegraph => svg(&title(&peer.service, &profile), &folded).into_bytes(),
        ProfileFormat::Folded => lines(&folded).into_bytes(),
        ProfileFormat::Pprof => profile.encode_compressed().map_err(Error::os("encode the profile"))?,
    })
}

/// Returns the line above a flame graph, such as `pod-sync: 120 ms of CPU in 10.0 s, 12 samples`.
fn title(service: &str, profile: &Profile) -> String {
    let sum = |at: usize| profile.sample.iter().filter_map(|sample| sample.value.get(at)).sum::<i64>();
    let (samples, cpu_ms) = (sum(0), sum(1) / 1_000_000);
    let tenths = profile.duration_nanos / 100_000_000;
    format!("{service}: {cpu_ms} ms of CPU in {}.{} s, {samples} samples", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: ProfileArgs,
    }

    #[test]
    fn arguments_have_bounds_and_the_heap_has_none() {
        for (line, is_valid) in [
            (&["pod-sync"][..], true),
            (&["pod-sync", "--seconds=60", "--hertz=999", "--format=pprof"], true),
            (&["probe-service", "--instance=probe-1", "--format=folded", "--file=f"], true),
            (&["pod-sync", "--heap"], true),
            (&[], false),
            (&["kubelet"], false),
            (&["pod-sync", "--seconds=0"], false),
            (&["pod-sync", "--seconds=61"], false),
            (&["pod-sync", "--hertz=0"], false),
            (&["pod-sync", "--hertz=1000"], false),
            (&["pod-sync", "--format=svg"], false),
            (&["pod-sync", "--heap", "--seconds=3"], false),
        ] {
            let parsed = Line::try_parse_from(["profile"].iter().chain(line));
            assert_eq!(parsed.is_ok(), is_valid, "{line:?}: {parsed:?}");
        }
    }

    #[test]
    fn one_of_several_instances_must_be_named() {
        let peers = || {
            ["probe-service probe-0", "probe-service probe-1"]
                .map(|name| Peer::new(name, "/s".into()))
                .to_vec()
        };
        let chosen =
            |peers, instance| choose(peers, instance).map(|peer| peer.service).map_err(|e| e.to_string());
        assert_eq!(chosen(peers(), Some("probe-1")), Ok("probe-service probe-1".to_owned()));
        assert_eq!(
            chosen(peers(), Some("probe-2")),
            Err("no instance probe-2; there are: probe-0, probe-1".to_owned())
        );
        assert_eq!(
            chosen(peers(), None),
            Err("there are several instances; use --instance with one of: probe-0, probe-1".to_owned())
        );
        assert_eq!(chosen(vec![Peer::new("pod-sync", "/s".into())], None), Ok("pod-sync".to_owned()));
    }
}
