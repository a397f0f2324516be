module example.com/exits

go 1.24

require (
	google.golang.org/grpc v1.79.3
	google.golang.org/protobuf v1.36.11
)
