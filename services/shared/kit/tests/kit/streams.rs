//! Sends each streaming method of the contracts one item over the limit among nine good ones. The methods
//! come from the descriptors: one without a case here fails the test.

use std::collections::BTreeMap;

use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use quintlet_kit::messages::{Bounded, bounded_requests};
use quintlet_proto::limits;
use quintlet_proto::{debug, pleg, podsync, probe, runtime, status, subscribe};
use tonic::codec::{Codec as _, EncodeBody, SingleMessageCompressionOverride, Streaming};
use tonic_prost::ProstCodec;

/// Good items beside the one that is too large.
const GOOD: usize = 9;
/// Limit of a receiver of the previous release: the default of tonic.
const PREVIOUS_RELEASE: usize = 4 << 20;

/// The side that sends the items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Sender {
    Client,
    Server,
}

/// Sends items, of which the one at a position is too large, and returns the texts of those that arrive.
type Case = fn(usize) -> BoxFuture<'static, Vec<String>>;

/// A method and the sender of its items, with an item that has a given text.
macro_rules! case {
    ($cases:ident, $name:literal, $sender:ident, $item:ty, $make:expr, $read:expr) => {{
        fn run(large: usize) -> BoxFuture<'static, Vec<String>> {
            let make: fn(String) -> $item = $make;
            let read: fn($item) -> Option<String> = $read;
            let items: Vec<$item> = (0..=GOOD)
                .map(|at| if at == large { "x".repeat(limits::ITEM + 1) } else { format!("item {at}") })
                .map(make)
                .collect();
            async move {
                let arrived = match Sender::$sender {
                    Sender::Server => from_server($name, items).await,
                    Sender::Client => from_client($name, items).await,
                };
                arrived.into_iter().map(|item| read(item).unwrap()).collect()
            }
            .boxed()
        }
        assert!($cases.insert(($name.to_owned(), Sender::$sender), run as Case).is_none(), $name);
    }};
}

async fn from_server<T: Message + Default + Clone + 'static>(name: &'static str, items: Vec<T>) -> Vec<T> {
    let items = Bounded::new(name, futures::stream::iter(items.into_iter().map(Ok)));
    let encoder = ProstCodec::<T, T>::default().encoder();
    let body = EncodeBody::new_server(
        encoder,
        items,
        None,
        SingleMessageCompressionOverride::default(),
        Some(limits::ANSWER),
    );
    let decoder = ProstCodec::<T, T>::default().decoder();
    let answers = Streaming::new_response(decoder, body, http::StatusCode::OK, None, Some(PREVIOUS_RELEASE));
    received(answers).await
}

async fn from_client<T: Message + Default + Clone + 'static>(name: &'static str, items: Vec<T>) -> Vec<T> {
    let (sender, receiver) = tokio::sync::mpsc::channel(GOOD + 1);
    for item in items {
        sender.try_send(item).unwrap();
    }
    drop(sender);
    let items = bounded_requests(name, receiver).map(Ok);
    let body =
        EncodeBody::new_client(ProstCodec::<T, T>::default().encoder(), items, None, Some(limits::REQUEST));
    let decoder = ProstCodec::<T, T>::default().decoder();
    received(Streaming::new_request(decoder, body, None, Some(PREVIOUS_RELEASE))).await
}

async fn received<T>(mut items: Streaming<T>) -> Vec<T> {
    let mut all = Vec::new();
    while let Some(item) = items.message().await.unwrap() {
        all.push(item);
    }
    all
}

fn cases() -> BTreeMap<(String, Sender), Case> {
    let mut all = BTreeMap::new();
    case!(
        all,
        "Debug.Metrics",
        Server,
        debug::v1::MetricsReply,
        |text| debug::v1::MetricsReply { text },
        |item| Some(item.text)
    );
    case!(
        all,
        "Debug.Traces",
        Server,
        debug::v1::TracesReply,
        |name| {
            let spans = vec![debug::v1::Span { name, ..Default::default() }];
            debug::v1::TracesReply { spans, dropped: 0 }
        },
        |item| Some(item.spans.first()?.name.clone())
    );
    case!(
        all,
        "Control.Profile",
        Server,
        debug::v1::ProfileReply,
        |text| debug::v1::ProfileReply { data: text.into_bytes() },
        |item| String::from_utf8(item.data).ok()
    );
    case!(
        all,
        "Pleg.Watch",
        Server,
        pleg::v1::WatchEvent,
        |name| {
            let pod = pleg::v1::PodRecord { name, ..Default::default() };
            let event = Some(pleg::v1::watch_event::Event::Pod(pod));
            pleg::v1::WatchEvent { event, ..Default::default() }
        },
        |item| match item.event {
            Some(pleg::v1::watch_event::Event::Pod(pod)) => Some(pod.name),
            _ => None,
        }
    );
    case!(
        all,
        "Containers.Watch",
        Server,
        subscribe::v1::WatchContainersEvent,
        |name| {
            let pod = subscribe::v1::PodContainers { name, ..Default::default() };
            let event = Some(subscribe::v1::watch_containers_event::Event::Pod(pod));
            subscribe::v1::WatchContainersEvent { event, cursor: None }
        },
        |item| match item.event {
            Some(subscribe::v1::watch_containers_event::Event::Pod(pod)) => Some(pod.name),
            _ => None,
        }
    );
    case!(
        all,
        "Probes.Watch",
        Server,
        subscribe::v1::WatchProbesEvent,
        |name| {
            let probe = subscribe::v1::ProbeState { name, ..Default::default() };
            let event = Some(subscribe::v1::watch_probes_event::Event::Probe(probe));
            subscribe::v1::WatchProbesEvent { event, cursor: None }
        },
        |item| match item.event {
            Some(subscribe::v1::watch_probes_event::Event::Probe(probe)) => Some(probe.name),
            _ => None,
        }
    );
    case!(
        all,
        "Pods.Watch",
        Server,
        subscribe::v1::WatchPodsEvent,
        |name| {
            let pod = subscribe::v1::PodState { name, ..Default::default() };
            let event = Some(subscribe::v1::watch_pods_event::Event::Pod(pod));
            subscribe::v1::WatchPodsEvent { event, cursor: None }
        },
        |item| match item.event {
            Some(subscribe::v1::watch_pods_event::Event::Pod(pod)) => Some(pod.name),
            _ => None,
        }
    );
    case!(
        all,
        "Pleg.Lifecycle",
        Server,
        pleg::v1::LifecycleEvent,
        |pod_name| {
            let lifecycle = pleg::v1::Lifecycle { pod_name, ..Default::default() };
            let event = Some(pleg::v1::lifecycle_event::Event::Lifecycle(lifecycle));
            pleg::v1::LifecycleEvent { event, ..Default::default() }
        },
        |item| match item.event {
            Some(pleg::v1::lifecycle_event::Event::Lifecycle(lifecycle)) => Some(lifecycle.pod_name),
            _ => None,
        }
    );
    case!(
        all,
        "PodSync.WatchPods",
        Server,
        podsync::v1::WatchPodsEvent,
        |name| {
            let pod = podsync::v1::PodView { name, ..Default::default() };
            let event = Some(podsync::v1::watch_pods_event::Event::Pod(pod));
            podsync::v1::WatchPodsEvent { event, trace: None }
        },
        |item| match item.event {
            Some(podsync::v1::watch_pods_event::Event::Pod(pod)) => Some(pod.name),
            _ => None,
        }
    );
    case!(
        all,
        "PodSync.ListPods",
        Server,
        podsync::v1::ListPodsReply,
        |name| {
            let pods = vec![podsync::v1::PodView { name, ..Default::default() }];
            podsync::v1::ListPodsReply { pods, problems: Vec::new() }
        },
        |item| Some(item.pods.first()?.name.clone())
    );
    case!(
        all,
        "PodSync.ListEvents",
        Server,
        podsync::v1::ListEventsReply,
        |message| {
            let events = vec![podsync::v1::EventView { message, ..Default::default() }];
            podsync::v1::ListEventsReply { events }
        },
        |item| Some(item.events.first()?.message.clone())
    );
    case!(
        all,
        "Volumes.List",
        Server,
        podsync::v1::ListVolumesReply,
        |error| {
            let volumes = vec![podsync::v1::VolumeView { error, ..Default::default() }];
            podsync::v1::ListVolumesReply { volumes }
        },
        |item| Some(item.volumes.first()?.error.clone())
    );
    case!(
        all,
        "Devices.List",
        Server,
        podsync::v1::ListDevicesReply,
        |error| {
            let resources = vec![podsync::v1::DeviceResource { error, ..Default::default() }];
            podsync::v1::ListDevicesReply { resources, holders: Vec::new() }
        },
        |item| Some(item.resources.first()?.error.clone())
    );
    case!(
        all,
        "Claims.List",
        Server,
        podsync::v1::ListClaimsReply,
        |error| {
            let drivers = vec![podsync::v1::ClaimDriver { error, ..Default::default() }];
            podsync::v1::ListClaimsReply { drivers, claims: Vec::new() }
        },
        |item| Some(item.drivers.first()?.error.clone())
    );
    case!(
        all,
        "Cpus.List",
        Server,
        podsync::v1::ListCpusReply,
        |pod| {
            let holders = vec![podsync::v1::CpuHolder { pod, ..Default::default() }];
            podsync::v1::ListCpusReply { holders, ..Default::default() }
        },
        |item| Some(item.holders.first()?.pod.clone())
    );
    case!(
        all,
        "Storage.List",
        Server,
        podsync::v1::ListStorageReply,
        |uid| {
            let pods = vec![podsync::v1::PodStorage { uid, ..Default::default() }];
            podsync::v1::ListStorageReply { pods, runtime: Vec::new() }
        },
        |item| Some(item.pods.first()?.uid.clone())
    );
    case!(
        all,
        "Probe.Drive",
        Client,
        probe::v1::DriveRequest,
        |name| {
            let target = probe::v1::PodTarget { name, ..Default::default() };
            let request = Some(probe::v1::drive_request::Request::Target(target));
            probe::v1::DriveRequest { request, trace: None }
        },
        |item| match item.request {
            Some(probe::v1::drive_request::Request::Target(target)) => Some(target.name),
            _ => None,
        }
    );
    case!(
        all,
        "Probe.Drive",
        Server,
        probe::v1::DriveReport,
        |message| {
            let unhealthy = probe::v1::Unhealthy { message, ..Default::default() };
            let report = Some(probe::v1::drive_report::Report::Unhealthy(unhealthy));
            probe::v1::DriveReport { report, trace: None }
        },
        |item| match item.report {
            Some(probe::v1::drive_report::Report::Unhealthy(unhealthy)) => Some(unhealthy.message),
            _ => None,
        }
    );
    case!(
        all,
        "Probe.Watch",
        Server,
        probe::v1::WatchEvent,
        |output| {
            let evaluation = probe::v1::Evaluation { output, ..Default::default() };
            let event = Some(probe::v1::watch_event::Event::Evaluation(evaluation));
            probe::v1::WatchEvent { event, ..Default::default() }
        },
        |item| match item.event {
            Some(probe::v1::watch_event::Event::Evaluation(evaluation)) => Some(evaluation.output),
            _ => None,
        }
    );
    case!(
        all,
        "RuntimeEvents.Watch",
        Server,
        runtime::v1::RuntimeEvent,
        |id| {
            let hint = runtime::v1::Hint { id, ..Default::default() };
            runtime::v1::RuntimeEvent {
                event: Some(runtime::v1::runtime_event::Event::Hint(hint)),
                trace: None,
            }
        },
        |item| match item.event {
            Some(runtime::v1::runtime_event::Event::Hint(hint)) => Some(hint.id),
            _ => None,
        }
    );
    case!(
        all,
        "ContainerLogs.Read",
        Server,
        runtime::v1::LogChunk,
        |text| runtime::v1::LogChunk { data: text.into_bytes() },
        |item| String::from_utf8(item.data).ok()
    );
    case!(
        all,
        "StatusReporter.Report",
        Client,
        status::v1::ReportRequest,
        |name| {
            let update = status::v1::PodStatusUpdate { name, ..Default::default() };
            status::v1::ReportRequest {
                request: Some(status::v1::report_request::Request::Update(update)),
                trace: None,
            }
        },
        |item| match item.request {
            Some(status::v1::report_request::Request::Update(update)) => Some(update.name),
            _ => None,
        }
    );
    case!(
        all,
        "StatusReporter.Report",
        Server,
        status::v1::ReportReply,
        |detail| {
            let ack = status::v1::Ack { detail, ..Default::default() };
            status::v1::ReportReply { reply: Some(status::v1::report_reply::Reply::Ack(ack)), trace: None }
        },
        |item| match item.reply {
            Some(status::v1::report_reply::Reply::Ack(ack)) => Some(ack.detail),
            _ => None,
        }
    );
    case!(
        all,
        "StatusReporter.NodeVolumes",
        Client,
        status::v1::NodeVolumesRequest,
        |text| status::v1::NodeVolumesRequest { removed_drivers: vec![text], ..Default::default() },
        |mut item| item.removed_drivers.pop()
    );
    case!(
        all,
        "StatusReporter.NodeVolumes",
        Server,
        status::v1::NodeVolumesReply,
        |text| status::v1::NodeVolumesReply { volumes_in_use: vec![text], ..Default::default() },
        |mut item| item.volumes_in_use.pop()
    );
    all
}

/// Returns the streams of all contracts, as `Service.Method`.
fn streams() -> Vec<(String, Sender)> {
    let set = prost_types::FileDescriptorSet::decode(quintlet_proto::FILE_DESCRIPTOR_SET).unwrap();
    let mut all = Vec::new();
    for service in set.file.iter().flat_map(|file| &file.service) {
        for method in &service.method {
            let name = format!("{}.{}", service.name(), method.name());
            if method.client_streaming() {
                all.push((name.clone(), Sender::Client));
            }
            if method.server_streaming() {
                all.push((name, Sender::Server));
            }
        }
    }
    all
}

#[tokio::test]
async fn an_item_over_the_limit_delays_no_other_item_of_any_stream() {
    let (mut cases, streams) = (cases(), streams());
    assert!(streams.len() >= 18, "{streams:?}");
    for stream in streams {
        let case = cases.remove(&stream).unwrap_or_else(|| panic!("{stream:?} has no case in this test"));
        for large in 0..=GOOD {
            let want: Vec<String> =
                (0..=GOOD).filter(|at| *at != large).map(|at| format!("item {at}")).collect();
            assert_eq!(case(large).await, want, "{stream:?} at {large}");
        }
    }
    assert!(cases.is_empty(), "no such streams: {:?}", cases.keys());
}

/// Unary answers that contain a list, each with its bound.
const BOUNDED_LISTS: [(&str, &str); 4] = [
    ("Debug.Build", "the refused peers: one entry per service, and per instance of probe-service"),
    ("Pleg.Observe", "the sandboxes and containers of one pod"),
    ("Pressure.Get", "the signals of evictions and their thresholds"),
    ("PodSync.Explain", "one pod: its containers, volumes and newest events"),
];

#[test]
fn a_list_that_grows_with_the_pods_is_a_stream() {
    let set = prost_types::FileDescriptorSet::decode(quintlet_proto::FILE_DESCRIPTOR_SET).unwrap();
    let messages: BTreeMap<String, &prost_types::DescriptorProto> = set
        .file
        .iter()
        .flat_map(|file| {
            file.message_type.iter().map(move |m| (format!(".{}.{}", file.package(), m.name()), m))
        })
        .collect();
    let mut unary = Vec::new();
    for service in set.file.iter().flat_map(|file| &file.service) {
        for method in service.method.iter().filter(|method| !method.server_streaming()) {
            let (mut reached, mut open) = (BTreeMap::new(), vec![method.output_type()]);
            while let Some(name) = open.pop() {
                let fields = messages.get(name).map(|message| &message.field[..]).unwrap_or_default();
                if reached.insert(name, fields).is_none() {
                    open.extend(fields.iter().filter_map(|field| field.type_name.as_deref()));
                }
            }
            let is_list = |field: &prost_types::FieldDescriptorProto| {
                field.label() == Label::Repeated && field.r#type() == Type::Message
            };
            if reached.values().any(|fields| fields.iter().any(is_list)) {
                unary.push(format!("{}.{}", service.name(), method.name()));
            }
        }
    }
    unary.sort();
    let mut want: Vec<&str> = BOUNDED_LISTS.iter().map(|(method, _)| *method).collect();
    want.sort_unstable();
    assert_eq!(unary, want, "a unary answer with a list needs a bound here, or is a stream");
}
