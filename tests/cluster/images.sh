# Images for the upstream test suites on a machine that reaches no registry; read with `.` after host-node.sh. They are stand-ins: busybox and what is in
# $kubernetes, under the names that a suite asks for.
#
#   kubernetes  may have agnhost, and localhost.crt and localhost.key for its server with TLS

# layer NAME: makes $work/images/NAME.tar from the folder $work/images/NAME.
layer() {
    tar -C "$work/images/$1" --owner=0 --group=0 --numeric-owner --sort=name -cf "$work/images/$1.tar" .
}

# image REFERENCE LAYERS SETTINGS: adds an image to the archive.
image() {
    number=$((${number:-0} + 1))
    digests='' files=''
    for name in $2; do
        digests="$digests${digests:+,}\"sha256:$(sha256sum "$work/images/$name.tar" | cut -d ' ' -f 1)\""
        files="$files${files:+,}\"$name.tar\""
    done
    printf '{"architecture":"amd64","os":"linux","config":%s,"rootfs":{"type":"layers","diff_ids":[%s]}}' "$3" "$digests" > "$work/images/$number.json"
    entries="${entries:-}${entries:+,}{\"Config\":\"$number.json\",\"RepoTags\":[\"$1\"],\"Layers\":[$files]}"
}

# make_layers: busybox, agnhost, and a program that prints the user that it runs as.
make_layers() {
    for name in busybox agnhost nnp web pause; do mkdir -p "$work/images/$name"; done
    tree=$work/images/busybox
    mkdir -p "$tree/bin" "$tree/etc" "$tree/tmp" "$tree/root" "$tree/home" "$tree/var/run" "$tree/usr/bin"
    chmod 1777 "$tree/tmp"
    cp "$(command -v busybox)" "$tree/bin/busybox"
    for applet in $("$tree/bin/busybox" --list); do
        [ "$applet" = busybox ] || ln -s busybox "$tree/bin/$applet"
    done
    ln -s /bin/env "$tree/usr/bin/env"
    printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/home:/bin/false\n' > "$tree/etc/passwd"
    printf 'root:x:0:\nnogroup:x:65534:\n' > "$tree/etc/group"
    tree=$work/images/agnhost
    mkdir -p "$tree/uploads" "$tree/etc"
    for file in agnhost localhost.crt localhost.key; do
        [ ! -f "$kubernetes/$file" ] || install -m 0755 "$kubernetes/$file" "$tree/$file"
    done
    ln -s agnhost "$tree/agnhost-2"
    # Specs use these in the image of agnhost, with the libraries that they load.
    for program in bash curl; do
        program=$(command -v $program)
        install -D -m 0755 "$program" "$tree/bin/$(basename "$program")"
        for library in $(ldd "$program" | grep -o '/[^ ]*' | sort -u); do
            install -D -m 0755 "$(readlink -f "$library")" "$tree$library"
        done
    done
    # A user of the image with a group of its own.
    { cat "$work/images/busybox/etc/passwd"; echo 'user-defined-in-image:x:1000:1000::/home:/bin/sh'; } > "$tree/etc/passwd"
    { cat "$work/images/busybox/etc/group"; printf 'user-defined-in-image:x:1000:\ngroup-defined-in-image:x:50000:user-defined-in-image\n'; } > "$tree/etc/group"
    mkdir -p "$work/images/nnp/usr/local/bin" "$work/images/web/www"
    printf '#include <stdio.h>\n#include <unistd.h>\nint main(void) { printf("Effective uid: %%d\\n", geteuid()); return 0; }\n' > "$work/images/nnp.c"
    cc -static -Os -s -o "$work/images/nnp/usr/local/bin/nnp" "$work/images/nnp.c"
    chmod 6755 "$work/images/nnp/usr/local/bin/nnp"
    echo 'Welcome to nginx!' > "$work/images/web/www/index.html"
    cc -static -Os -s -o "$work/images/pause/pause" "$repo/services/shared/localnode/src/pause.c"
    for name in busybox agnhost nnp web pause; do layer $name; done
}

# stand_ins REFERENCE...: makes $work/images.tar. A reference that no stand-in fits gets none.
stand_ins() {
    path='"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]'
    for reference in "$@"; do
        # Tests want a registry to refuse these.
        case $reference in invalid* | *authenticated*) continue ;; esac
        case ${reference##*/} in
            agnhost:*) image "$reference" "busybox agnhost" "{$path,\"Entrypoint\":[\"/agnhost\"],\"Cmd\":[\"pause\"]}" ;;
            busybox:* | glibc-dns-testing:*) image "$reference" busybox "{$path,\"Cmd\":[\"sh\"]}" ;;
            nonroot:*) image "$reference" busybox "{$path,\"Cmd\":[\"sh\"],\"User\":\"1234\"}" ;;
            nonewprivs:*) image "$reference" "busybox nnp" "{$path,\"Cmd\":[\"nnp\"]}" ;;
            nginx:* | httpd:*) image "$reference" "busybox web" "{$path,\"Cmd\":[\"httpd\",\"-f\",\"-p\",\"80\",\"-h\",\"/www\"]}" ;;
            pause:*) image "$reference" pause '{"User":"65535:65535","Entrypoint":["/pause"]}' ;;
        esac
    done
    printf '[%s]' "$entries" > "$work/images/manifest.json"
    (cd "$work/images" && tar -cf "$work/images.tar" manifest.json ./*.json ./*.tar)
}
