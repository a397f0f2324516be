//! The contracts between the five services, compiled from `proto/quintlet/*/v1`.
//!
//! The wire types end here: each service turns them into the types of `quintlet-model` at its edge.

pub mod limits;

/// Shared pieces: greeting, trace context.
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod common {
    pub mod v1 {
        tonic::include_proto!("quintlet.common.v1");
    }
}
/// Runtime hints and probe execs (cri-proxy).
///
/// Prints runtime events, as cri-proxy receives them:
///
/// ```no_run
/// use quintlet_proto::runtime::v1::runtime_event::Event;
/// use quintlet_proto::runtime::v1::{WatchHintsRequest, runtime_events_client::RuntimeEventsClient};
///
/// # async fn watch() -> Result<(), Box<dyn std::error::Error>> {
/// let mut proxy = RuntimeEventsClient::connect("unix:///run/quintlet/cri/read/cri.sock").await?;
/// let request = WatchHintsRequest { hello: Some(quintlet_proto::hello()) };
/// let mut events = proxy.watch(request).await?.into_inner();
/// while let Some(event) = events.message().await? {
///     match event.event {
///         Some(Event::Source(source)) => println!("source {:?}, live: {}", source.source(), source.live),
///         Some(Event::Hint(hint)) => println!("{:?} {}", hint.kind(), hint.id),
///         // This client was too slow and missed events: list everything.
///         Some(Event::Overrun(_)) => println!("missed events"),
///         _ => {}
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod runtime {
    pub mod v1 {
        tonic::include_proto!("quintlet.runtime.v1");
    }
}
/// Runtime state of pods (pleg-service).
///
/// Prints the latest state of each pod, as it changes:
///
/// ```no_run
/// use quintlet_proto::pleg::v1::{WatchRequest, pleg_client::PlegClient, watch_event::Event};
///
/// # async fn watch() -> Result<(), Box<dyn std::error::Error>> {
/// let mut pleg = PlegClient::connect("unix:///run/quintlet/pleg/pleg.sock").await?;
/// let request = WatchRequest { hello: Some(quintlet_proto::hello()), resume: None };
/// let mut events = pleg.watch(request).await?.into_inner();
/// while let Some(event) = events.message().await? {
///     // To resume after a lost connection, keep `event.cursor` and send it as `resume`.
///     match event.event {
///         Some(Event::Pod(pod)) => println!("{}/{}: {} containers", pod.namespace, pod.name, pod.containers.len()),
///         Some(Event::Gone(pod)) => println!("{} is gone", pod.uid),
///         _ => {}
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod pleg {
    pub mod v1 {
        tonic::include_proto!("quintlet.pleg.v1");
    }
}
/// Probe targets and results (probe-service).
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod probe {
    pub mod v1 {
        tonic::include_proto!("quintlet.probe.v1");
    }
}
/// API writes (status-reporter).
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod status {
    pub mod v1 {
        tonic::include_proto!("quintlet.status.v1");
    }
}
/// Pods and decisions (pod-sync).
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod podsync {
    pub mod v1 {
        tonic::include_proto!("quintlet.podsync.v1");
    }
}
/// Containers, probe results and pods for programs that are not part of Quintlet (pleg-service,
/// probe-service, pod-sync).
///
/// Prints each exit that a pod still has, at each change of the pod:
///
/// ```no_run
/// use quintlet_proto::subscribe::v1::watch_containers_event::Event;
/// use quintlet_proto::subscribe::v1::{ContainerState, WatchContainersRequest, containers_client::ContainersClient};
///
/// # async fn watch() -> Result<(), Box<dyn std::error::Error>> {
/// let mut pleg = ContainersClient::connect("unix:///run/quintlet/subscribe/pleg/subscribe.sock").await?;
/// let mut events = pleg.watch(WatchContainersRequest::default()).await?.into_inner();
/// while let Some(event) = events.message().await? {
///     // To resume after a lost connection, keep `event.cursor` and send it as `resume`.
///     let Some(Event::Pod(pod)) = event.event else { continue };
///     for container in pod.containers.iter().filter(|c| c.state() == ContainerState::Exited) {
///         println!("{}/{} {}: {} {}", pod.namespace, pod.name, container.name, container.exit_code, container.reason);
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod subscribe {
    pub mod v1 {
        tonic::include_proto!("quintlet.subscribe.v1");
    }
}
/// Spans, metrics, build (every service).
#[allow(missing_docs, clippy::all, unreachable_pub, reason = "generated from the contract")]
pub mod debug {
    pub mod v1 {
        tonic::include_proto!("quintlet.debug.v1");
    }
}

/// Descriptors of all contracts, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = tonic::include_file_descriptor_set!("quintlet");

/// Version of the contracts this build speaks.
pub const SCHEMA: u32 = 1;

/// Names of features in a `Hello`. A service without a feature ignores the fields of the feature, which
/// changes their meaning.
pub mod features {
    /// `Grpc.tls` of a probe.
    pub const GRPC_PROBE_TLS: &str = "grpc-probe-tls";
    /// `HttpGet.h2c` of a probe.
    pub const HTTP_PROBE_H2C: &str = "http-probe-h2c";
    /// The features of this build.
    pub const ALL: [&str; 2] = [GRPC_PROBE_TLS, HTTP_PROBE_H2C];
}

/// The greeting of this build.
pub fn hello() -> common::v1::Hello {
    let features = features::ALL.map(str::to_owned).to_vec();
    common::v1::Hello { build: env!("CARGO_PKG_VERSION").to_owned(), features, schema: SCHEMA }
}
