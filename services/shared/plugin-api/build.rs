//! Compiles the contracts.

fn main() -> std::io::Result<()> {
    let files = [
        "proto/registration.proto",
        "proto/csi.proto",
        "proto/deviceplugin.proto",
        "proto/dra.proto",
        "proto/dra_v1beta1.proto",
        "proto/dra_health.proto",
        "proto/dra_health_v1alpha1.proto",
    ];
    // Requests with credentials have a `Debug` of their own, which omits them.
    let secret = ["NodeStageVolumeRequest", "NodePublishVolumeRequest", "NodeExpandVolumeRequest"];
    let secret = secret.map(|message| format!(".csi.v1.{message}"));
    tonic_prost_build::configure()
        .skip_debug(secret)
        .btree_map(".v1beta1")
        .btree_map(".k8s.io.kubelet.pkg.apis.dra")
        .compile_protos(&files, &["proto"])?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
