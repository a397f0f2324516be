//! Profiles over `debug.v1.Control` of a server in this process.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use quintlet_kit::control::ControlService;
use quintlet_kit::messages::whole;
use quintlet_kit::server::Server;
use quintlet_kit::socket::{Peer, PeerPolicy, bind_unix, channel};
use quintlet_profile::format::{Location, Profile};
use quintlet_proto::debug::v1::control_client::ControlClient;
use quintlet_proto::debug::v1::control_server::Control;
use quintlet_proto::debug::v1::{ProfileKind, ProfileRequest};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Channel;
use tonic::{Code, Request};

const LIMIT: Duration = Duration::from_secs(20);

async fn start() -> (ControlClient<Channel>, tempfile::TempDir, DropGuard) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("area/area.sock");
    let listener = bind_unix(&path, 0o660).unwrap();
    let stop = CancellationToken::new();
    let guard = stop.clone().drop_guard();
    tokio::spawn(
        async move { Server::new("kit-test").serve(listener, PeerPolicy::Any, stop).await.unwrap() },
    );
    (ControlClient::new(channel(path)), dir, guard)
}

fn request(kind: ProfileKind, seconds: u32, hertz: u32) -> ProfileRequest {
    ProfileRequest { kind: kind.into(), seconds, hertz }
}

/// Uses a processor. Its frame is in the profile, below that of its caller.
#[inline(never)]
fn burn(stop: &AtomicBool) -> u64 {
    let mut sum = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        for n in 0..1000_u64 {
            sum = black_box(sum.wrapping_mul(31).wrapping_add(n));
        }
    }
    sum
}

#[inline(never)]
fn outer(stop: &AtomicBool) -> u64 {
    black_box(burn(stop)).wrapping_add(1)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cpu_profile_has_the_stacks_of_a_busy_thread_and_the_build_id_of_the_program() {
    let (mut client, _dir, _guard) = start().await;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let burning =
        std::thread::Builder::new().name("burner".to_owned()).spawn(move || outer(&stopped)).unwrap();
    let reply = whole(client.profile(request(ProfileKind::Cpu, 2, 99))).await;
    stop.store(true, Ordering::Relaxed);
    burning.join().unwrap();
    let profile = Profile::decode_compressed(&reply.unwrap().into_inner().data).unwrap();

    let location = |id: u64| -> &Location { profile.location.iter().find(|l| l.id == id).unwrap() };
    // No function of this file is larger.
    let is_in = |address: u64, function: usize| (function..function + 4096).contains(&(address as usize));
    let (burn, outer) = (burn as *const () as usize, outer as *const () as usize);
    let of_burner: Vec<_> =
        profile.sample.iter().filter(|sample| profile.text(sample.label[0].str) == "burner").collect();
    let samples: i64 = of_burner.iter().map(|sample| sample.value[0]).sum();
    let unwound = of_burner.iter().filter(|sample| {
        let addresses: Vec<u64> = sample.location_id.iter().map(|id| location(*id).address).collect();
        let inner = addresses.iter().position(|address| is_in(*address, burn));
        let caller = addresses.iter().position(|address| is_in(*address, outer));
        matches!((inner, caller), (Some(inner), Some(caller)) if inner < caller)
    });
    let unwound: i64 = unwound.map(|sample| sample.value[0]).sum();
    // Two seconds of one processor, on a machine that may be busy.
    assert!(samples >= 20, "{samples} samples: {profile:?}");
    assert!(unwound * 10 >= samples * 9, "{unwound} of {samples} samples have burn and its caller");
    // A sample stands for the CPU time that it took.
    let cpu: i64 = profile.sample.iter().map(|sample| sample.value[1]).sum();
    assert!(cpu > 200_000_000 && profile.duration_nanos >= 2_000_000_000, "{cpu} {}", profile.duration_nanos);

    let own = std::env::current_exe().unwrap();
    let mapping = location(of_burner[0].location_id[0]).mapping_id;
    let mapping = profile.mapping.iter().find(|m| m.id == mapping).unwrap();
    assert_eq!(profile.text(mapping.filename), own.to_str().unwrap());
    assert_eq!(profile.text(mapping.build_id).len(), 40, "{mapping:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_takes_one_profile_at_a_time_until_its_caller_goes_away() {
    let (mut client, _dir, _guard) = start().await;
    // The answer begins once the profile has begun.
    let first = client.profile(request(ProfileKind::Cpu, 60, 99)).await.unwrap();
    let busy = client.profile(request(ProfileKind::Cpu, 1, 99)).await.unwrap_err();
    assert_eq!(busy.code(), Code::ResourceExhausted, "{busy}");
    assert!(busy.message().contains("another profile"), "{busy}");
    drop(first);
    let again = async {
        loop {
            match whole(client.profile(request(ProfileKind::Cpu, 1, 999))).await {
                Ok(reply) => return reply.into_inner(),
                Err(status) => assert_eq!(status.code(), Code::ResourceExhausted, "{status}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let reply = tokio::time::timeout(LIMIT, again).await.expect("the first profile ends with its caller");
    assert!(Profile::decode_compressed(&reply.data).is_ok());
}

#[tokio::test]
async fn a_profile_that_cannot_be_taken_is_refused_by_name() {
    let (mut client, _dir, _guard) = start().await;
    for (request, code, text) in [
        (request(ProfileKind::Unspecified, 1, 99), Code::InvalidArgument, "kind must be"),
        (ProfileRequest { kind: 7, seconds: 1, hertz: 99 }, Code::InvalidArgument, "kind must be"),
        (request(ProfileKind::Cpu, 0, 99), Code::InvalidArgument, "seconds must be from 1 to 60, not 0"),
        (request(ProfileKind::Cpu, 61, 99), Code::InvalidArgument, "seconds must be from 1 to 60, not 61"),
        (request(ProfileKind::Cpu, 1, 1000), Code::InvalidArgument, "hertz must be from 1 to 999, not 1000"),
        (request(ProfileKind::Heap, 0, 0), Code::FailedPrecondition, "this build has no heap profile"),
    ] {
        let refused = client.profile(request).await.unwrap_err();
        assert_eq!(refused.code(), code, "{request:?}: {refused}");
        assert!(refused.message().contains(text), "{request:?}: {refused}");
    }
    // A request without a connection has no user.
    let refused = Control::profile(&ControlService, Request::new(request(ProfileKind::Cpu, 1, 99))).await;
    assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);
    let mut other = Request::new(request(ProfileKind::Cpu, 1, 99));
    other.extensions_mut().insert(Peer { uid: nix::unistd::geteuid().as_raw() + 1, pid: None });
    let refused = Control::profile(&ControlService, other).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
}
